"""Source, differences and tables are shown as they are, with the same text on every machine."""

import contextlib
import re
import shlex
from dataclasses import replace

import pytest

from ddp_helpers.launch.commands import Job, torchrun
from ddp_helpers.launch.hosts import parse_hosts
from ddp_helpers.lesson import show
from ddp_helpers.worker.environment import explain


@pytest.fixture
def shown(monkeypatch):
    """Collect (markdown, plain text) in place of displaying it."""
    collected = []
    monkeypatch.setattr(show, "_display", lambda *texts: collected.append(texts))
    return collected


def alone(model, batch):
    loss = model(batch)
    loss.backward()
    return loss


class Holder:
    def together(self, model, batch):
        loss = model(batch)
        loss.backward()
        self.reduce(loss)
        return loss


def test_source_is_shown_with_the_file_it_is_from(shown):
    show.show_source(explain)
    markdown, plain = shown[0]
    assert markdown.startswith(
        "From `ddp_helpers/worker/environment.py`:\n\n```python\ndef explain("
    )
    assert markdown.endswith("\n```")
    assert plain.startswith("def explain(")


def test_source_of_a_library_is_named_from_its_package_on(shown):
    show.show_source(pytest.param)
    assert "From `_pytest/mark/__init__.py`" in shown[0][0]


def test_several_sources_are_shown_one_after_the_other(shown):
    show.show_source(alone, Holder)
    assert [plain.split("(")[0].split(":")[0] for _, plain in shown] == [
        "def alone",
        "class Holder",
    ]


def test_a_decorated_function_is_shown_and_not_its_wrapper(shown):
    @contextlib.contextmanager
    def opened():
        yield

    show.show_source(opened)
    assert shown[0][0].startswith("From `tests/lesson/test_show.py`:")
    assert shown[0][1].startswith("@contextlib.contextmanager\ndef opened():")


def test_a_difference_is_counted_and_computed_without_indentation(shown):
    show.show_diff(alone, Holder.together)
    markdown, plain = shown[0]
    assert markdown.startswith(
        "From `alone` to `together`: 2 lines added, 1 line removed.\n\n```diff"
    )
    assert plain.splitlines()[3:] == [
        "-def alone(model, batch):",
        "+def together(self, model, batch):",
        "     loss = model(batch)",
        "     loss.backward()",
        "+    self.reduce(loss)",
        "     return loss",
    ]


def test_a_table_has_the_columns_asked_for_in_markdown_and_in_text(shown):
    rows = [{"rank": 0, "host": "node-a", "loss": 0.123456, "x": 1}, {"rank": 10, "host": "b|c"}]
    show.table(rows, ["rank", "host", "loss"])
    markdown, plain = shown[0]
    assert markdown.splitlines() == [
        "| rank | host | loss |",
        "| ---: | --- | ---: |",
        "| 0 | node-a | 0.1235 |",
        "| 10 | b\\|c |  |",
    ]
    assert plain.splitlines() == [
        "rank  host      loss",
        "   0  node-a  0.1235",
        "  10  b|c",
    ]


def test_a_table_without_columns_takes_them_from_the_first_row(shown):
    show.table([{"a": 1, "b": True}])
    assert shown[0][0].splitlines()[0] == "| a | b |"


def test_display_sends_both_kinds_of_text():
    from IPython.core.displaypub import CapturingDisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell.instance()
    try:
        shell.display_pub = CapturingDisplayPublisher()
        show.table([{"a": 1}])
        assert set(shell.display_pub.outputs[0]["data"]) == {"text/markdown", "text/plain"}
    finally:
        InteractiveShell.clear_instance()


def test_commands_keep_their_words_when_their_lines_are_broken(capsys):
    args = ("--name", "a b", *["--more", "of-a-length-that-differs-from-line-to-line"] * 9)
    job = Job("train.py", args, hosts=parse_hosts("a:2,b:2"), python="python")
    commands = torchrun(replace(job, env={"NOTE": "two words"}))
    show.show_commands(commands)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 88
    assert not re.search(r"--more \\\n", printed)
    typed = [line.split("$ ", 1) for line in printed.replace("\\\n", "").splitlines()]
    assert [host for host, _ in typed] == ["a", "b"]
    for command, (_, line) in zip(commands, typed, strict=True):
        assert shlex.split(line) == shlex.split(str(command))
