"""The cost model beside what can be worked out by hand, and beside a published figure."""

import pytest

from ddp_helpers.bench.cost_model import (
    MIB,
    Bucket,
    Link,
    Work,
    accumulated,
    all_reduce_s,
    compressed,
    curve,
    even_buckets,
    last_that_pays,
    rate_to_hide,
    simulate,
)

FAST = Link(0.0, 1e18)


ALL_AT_THE_END = (Bucket(100.0, 1.0),)


def work(buckets=ALL_AT_THE_END, broadcast_bytes=0.0):
    return Work(8, 1.0, 2.0, 0.5, buckets, broadcast_bytes)


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        pytest.param(1, 0.0, id="nobody to send to"),
        pytest.param(2, 2 * 0.5 + 100 / 10, id="two: half each way"),
        pytest.param(4, 6 * 0.5 + 1.5 * 100 / 10, id="four"),
    ],
)
def test_a_ring_takes_two_messages_less_two_of_an_nth_each(ranks, seconds):
    assert all_reduce_s(100, ranks, Link(0.5, 10)) == pytest.approx(seconds)


def test_one_rank_alone_takes_the_sum_of_its_parts():
    step = simulate(work(), 1, Link(1.0, 1.0))
    assert (step.seconds, step.exposed_s) == (3.5, 0.0)


def test_gradients_that_are_ready_at_the_end_are_waited_for_in_full():
    step = simulate(work(), 2, Link(0.0, 50.0))
    assert step.exposed_s == pytest.approx(2.0)
    assert step.seconds == pytest.approx(3.5 + 2.0)


def test_gradients_that_are_ready_early_are_sent_while_the_backward_goes_on():
    buckets = (Bucket(100.0, 0.25), Bucket(100.0, 1.0))
    step = simulate(work(buckets), 2, Link(0.0, 100.0))
    sent = [(span.begin_s, span.end_s) for span in step.spans if span.what == "bucket"]
    assert sent == [pytest.approx((1.5, 2.5)), pytest.approx((3.0, 4.0))]
    assert step.exposed_s == pytest.approx(1.0)  # the second bucket alone


def test_a_bucket_waits_for_the_one_before():
    buckets = (Bucket(300.0, 0.25), Bucket(100.0, 0.5))
    step = simulate(work(buckets), 2, Link(0.0, 100.0))
    sent = [(span.begin_s, span.end_s) for span in step.spans if span.what == "bucket"]
    assert sent == [pytest.approx((1.5, 4.5)), pytest.approx((4.5, 5.5))]


def test_where_no_core_is_spare_sending_takes_computing_time():
    buckets = (Bucket(100.0, 0.0),)
    link = Link(0.0, 100.0, stolen_s_per_byte=0.005)  # while sending, computing at half speed
    step = simulate(work(buckets), 2, link)
    # 1 s of sending costs 0.5 s of computing.
    assert step.seconds == pytest.approx(3.5 + 0.5)
    assert step.exposed_s == pytest.approx(0.0)


def test_sending_goes_at_its_slower_rate_until_the_backward_ends():
    link = Link(0.0, 100.0, busy_bytes_per_s=50.0)
    step = simulate(work((Bucket(200.0, 0.0),)), 2, link)
    assert step.exposed_s == pytest.approx(1.0)  # 100 bytes in 2 s, 100 in 1 s


@pytest.mark.parametrize("stolen", [0.0, 0.003, 0.009])
@pytest.mark.parametrize("rate", [20.0, 100.0, 1000.0])
def test_a_step_is_never_shorter_than_its_computing_or_its_sending(rate, stolen):
    buckets = tuple(Bucket(80.0, part / 5) for part in range(1, 6))
    step = simulate(work(buckets), 4, Link(0.001, rate, stolen_s_per_byte=stolen / 10))
    assert step.seconds >= 3.5
    assert step.seconds >= 1 + 0.5 + all_reduce_s(400, 4, Link(0.001, rate)) - 1e-9
    assert step.seconds <= 3.5 + 5 * 6 * 0.001 + 600 / rate * (1 + stolen * rate) + 1e-9


def test_buffers_are_sent_before_the_forward():
    step = simulate(work(broadcast_bytes=50.0), 4, Link(0.25, 100.0, 1e18))
    assert [span for span in step.spans if span.what == "broadcast"][0].end_s == 2 * 0.25 + 0.5


def test_ddps_buckets_are_a_small_one_and_equal_ones():
    buckets = even_buckets(101 * MIB)
    assert [bucket.bytes / MIB for bucket in buckets] == [1, 25, 25, 25, 25]
    assert [bucket.ready for bucket in buckets] == pytest.approx(
        [1 / 101, 26 / 101, 51 / 101, 76 / 101, 1]
    )
    assert sum(bucket.bytes for bucket in even_buckets(0.5 * MIB)) == 0.5 * MIB


def test_weak_scaling_keeps_the_images_of_a_rank_and_strong_scaling_those_of_all():
    weak, strong = (curve(work(), lambda ranks: FAST, [1, 2, 4], s) for s in (False, True))
    assert [point.images_per_s for point in weak] == pytest.approx([8 / 3.5, 16 / 3.5, 32 / 3.5])
    assert [point.efficiency for point in weak] == pytest.approx([1, 1, 1])
    # The optimizer does not shrink with the images: 0.5 of 3.5 s stay.
    assert [point.step_s for point in strong] == pytest.approx([3.5, 2.0, 1.25])
    assert strong[2].efficiency == pytest.approx(3.5 / 1.25 / 4)


def test_accumulated_batches_exchange_once_and_compressed_gradients_send_less():
    four = simulate(accumulated(work(), 4), 2, Link(0.0, 50.0))
    assert four.seconds == pytest.approx(4 * 3.0 + 0.5 + 2.0)
    assert simulate(compressed(work(), 2), 2, Link(0.0, 50.0)).exposed_s == pytest.approx(1.0)


def test_more_ranks_stop_paying_where_messages_cost_more_than_they_save():
    assert last_that_pays(work(), lambda ranks: FAST) is None
    assert last_that_pays(work(), lambda ranks: FAST, strong=True) == 4  # then 0.5 s is the most
    latency = Link(0.01, 1e18)  # a step of 6.04 s with 128 ranks, of 8.60 s with 256
    assert last_that_pays(work(), lambda ranks: latency) == 128


def test_goyals_figure_for_resnet50_comes_out():
    """Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 4: 100 MB of gradients and a
    backward of 120 ms (125 in the division there) need 12.8 Gbit/s."""
    resnet50 = Work(32, 0.06, 0.125, 0.0, even_buckets(100e6))
    assert 8 * rate_to_hide(resnet50, 100_000) / 1e9 == pytest.approx(12.8, rel=1e-3)
    # On their 50 Gbit/s, 256 GPUs keep more than the 0.9 that the paper measured.
    share = curve(resnet50, lambda ranks: Link(5e-6, 50e9 / 8), [256])[0].efficiency
    assert 0.9 < share < 1.0


def test_thousands_of_ranks_are_computed_in_no_time():
    points = curve(work(even_buckets(1e9)), lambda ranks: Link(1e-6, 1e9), range(1, 4097))
    assert len(points) == 4096
    assert all(0 < point.efficiency <= 1 for point in points)
