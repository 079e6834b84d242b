"""ssh keys and ssh check, against real sshd: each way to fail is named, all hosts at once."""

import argparse
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ddp_helpers.launch import ssh_ask, ssh_cli, ssh_keys, ssh_text
from ddp_helpers.launch.ssh import ssh_command
from ddp_helpers.launch.ssh_check import CHECKS, check_hosts

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
ME = pwd.getpwuid(os.getuid()).pw_name


def ssh(*words):
    """Call the command in this process and return its exit status."""
    parser = argparse.ArgumentParser(prog="ssh")
    ssh_cli.add_arguments(parser)
    try:
        return ssh_cli.main(parser.parse_args([str(word) for word in words]))
    except SystemExit as wrong_use:
        return wrong_use.code


def new_key(path: Path) -> str:
    """Make a key without a passphrase; return the public half."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path.with_name(f"{path.name}.pub").read_text()


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


class Hosts:
    """Hosts of a private ssh configuration file, some with an sshd; stop() ends all of them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = folder / "config"
        self.known_hosts = folder / "known_hosts"
        self.opened = []
        self.authorized = new_key(folder / "id")
        self.host_key = new_key(folder / "host_key")

    def add(self, name: str, port: int, host_key: str | None = None, key: str = "id") -> None:
        """Write a host into the configuration, and its key where the client looks for it."""
        with self.config.open("a") as config:
            config.write(
                f"Host {name}\n  HostName 127.0.0.1\n  Port {port}\n  User {ME}\n"
                f"  IdentityFile {self.folder / key}\n  IdentitiesOnly yes\n  IdentityAgent none\n"
                f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
            )
        if host_key:
            with self.known_hosts.open("a") as known:
                known.write(f"[127.0.0.1]:{port} {host_key}")

    def silent(self, name: str) -> None:
        """Add a host that drops packets: where connections queue and nobody accepts, SYNs are."""
        listener = socket.create_server(("127.0.0.1", 0), backlog=0)
        self.opened.append(listener)
        for _ in range(3):
            client = socket.socket()
            client.setblocking(False)
            client.connect_ex(listener.getsockname())
            self.opened.append(client)
        self.add(name, listener.getsockname()[1])

    def mute(self, name: str) -> None:
        """Add a host where something accepts connections and never greets."""
        listener = socket.create_server(("127.0.0.1", 0))
        self.opened.append(listener)
        self.add(name, listener.getsockname()[1])

    def sshd(self, name: str, *settings: str, known: bool = True, key: str = "id") -> int:
        """Start an sshd, add it as a host, and return its port."""
        if os.geteuid() == 0:  # root's sshd locks its unprivileged half in there
            Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        authorized = self.folder / f"{name}_authorized_keys"
        authorized.write_text(self.authorized)
        config = self.folder / f"{name}_sshd_config"
        lines = (
            *settings,
            f"ListenAddress 127.0.0.1:{port}",
            f"HostKey {self.folder / 'host_key'}",
            f"AuthorizedKeysFile {authorized}",
            "PidFile none",
            "StrictModes no",
            "UsePAM no",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
        )
        config.write_text("".join(f"{line}\n" for line in lines))
        log = (self.folder / f"{name}.log").open("w")
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", config], stderr=log)
        log.close()
        self.opened.append(process)
        began = time.monotonic()
        while "Server listening" not in (self.folder / f"{name}.log").read_text():
            assert process.poll() is None, (self.folder / f"{name}.log").read_text()
            assert time.monotonic() < began + 10
            time.sleep(0.02)
        self.add(name, port, self.host_key if known else None, key)
        return port

    def stop(self) -> list[str]:
        """Stop everything; return the commands of connections that had not ended by themselves."""
        left = []
        for opened in self.opened:
            if isinstance(opened, socket.socket):
                opened.close()
                continue
            sessions = psutil.Process(opened.pid).children(recursive=True)
            opened.terminate()
            opened.wait(timeout=10)
            _, alive = psutil.wait_procs(sessions, timeout=5)
            for process in alive:
                left.append(str(process))
                process.kill()
        return left


@pytest.fixture
def hosts(tmp_path):
    if not shutil.which("ssh"):
        pytest.skip("needs ssh, from the package openssh-client")
    made = Hosts(tmp_path)
    yield made
    assert not made.stop()


@pytest.fixture
def needs_sshd():
    if not SSHD:
        pytest.skip("needs sshd, from the package openssh-server")


def verdicts(checks, host):
    """Return {name of the check: ok} of one host."""
    return {check.name: check.ok for check in checks if check.host == host}


def failed(checks):
    """Return the one check that failed; those behind it were not asked."""
    (check,) = [check for check in checks if check.ok is False]
    assert check.fix
    return check


def stops_at(checks, name):
    """Return the failed check, which is name: those before it passed, those behind have None."""
    place = CHECKS.index(name)
    expected = [True] * place + [False] + [None] * (len(CHECKS) - place - 1)
    assert [check.ok for check in checks] == expected, checks
    return failed(checks)


# --- all is well ----------------------------------------------------------------------------------


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_a_host_like_this_one_passes_every_check(hosts, capsys):
    hosts.sshd("node-a")
    hosts.sshd("node-b")
    assert ssh("check", "-F", hosts.config, "node-a", "node-b") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["node-a"] * 7 + ["node-b"] * 7
    assert lines[2].split() == ["node-a", "login", "ok", "as", ME]
    assert lines[3].split() == ["node-a", "python", "ok", sys.executable]
    assert lines[4].split() == ["node-a", "torch", "ok", ssh_ask.versions()["torch"]]
    assert lines[6].split()[:3] == ["node-a", "clock", "ok"]


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
@pytest.mark.parametrize("shell", ["bash", "dash"])
def test_any_shell_may_be_the_hosts_sh(hosts, shell):
    if not (program := shutil.which(shell)):
        pytest.skip(f"needs {shell}")
    (hosts.folder / "bin").mkdir()
    (hosts.folder / "bin" / "sh").symlink_to(program)
    hosts.sshd("node-a", f"SetEnv PATH={hosts.folder / 'bin'}:/usr/bin:/bin")
    assert all(verdicts(check_hosts(["node-a"], str(hosts.config)), "node-a").values())


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_hosts_are_given_as_for_launch(hosts, capsys):
    hosts.sshd("node-a")
    hostfile = hosts.folder / "hosts.txt"
    hostfile.write_text("node-a slots=2\n")
    assert ssh("check", "-F", hosts.config, "--hosts", "node-a:2") == 0
    assert ssh("check", "-F", hosts.config, "--hostfile", hostfile) == 0
    assert capsys.readouterr().out.count("login") == 2


def test_ssh_asks_nothing_and_is_told_where_its_options_end():
    options = "BatchMode=yes ConnectTimeout=5 ServerAliveInterval=15 ControlPath=none"
    words = [word for option in options.split() for word in ("-o", option)]
    assert ssh_command("node-a", "my config", ["Port=23"]) == (
        ["ssh", "-F", "my config", "-T", *words]
        + ["-o", "UpdateHostKeys=no", "-o", "Port=23", "--", "node-a"]
    )


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_a_command_runs_on_the_host_that_ssh_command_names(hosts):
    hosts.sshd("node-a")
    command = [*ssh_command("node-a", str(hosts.config)), "echo $((6 * 7)) ; exit 3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "42\n", "")


# --- the way in -----------------------------------------------------------------------------------


def test_a_name_without_an_address_is_told(hosts):
    hosts.config.write_text("")
    checks = check_hosts(["no-such-host.invalid"], str(hosts.config))
    check = stops_at(checks, "reachable")
    assert check.seen.startswith("the name no-such-host.invalid has no address: ")
    assert check.fix == "echo ADDRESS no-such-host.invalid | sudo tee -a /etc/hosts"


def test_a_port_without_sshd_is_told(hosts, free_port):
    hosts.add("node-a", free_port)
    check = stops_at(check_hosts(["node-a"], str(hosts.config)), "reachable")
    assert check.seen == f"refused: no sshd on port {free_port} of 127.0.0.1"
    assert check.fix == "on node-a: sudo systemctl start sshd"


def test_dropped_packets_on_many_hosts_take_no_longer_than_on_one(hosts, capsys):
    names = [f"node-{number}" for number in range(8)]
    for name in names[1:]:
        hosts.silent(name)
    hosts.mute(names[0])
    began = time.monotonic()
    assert ssh("check", "-F", hosts.config, *names) == 1
    assert time.monotonic() - began < 9
    out = capsys.readouterr().out
    assert out.count("FAIL") == 8
    assert out.count(" of 127.0.0.1 gave no answer in 5 s, it is switched off or a firewall") == 7
    assert out.count("fix: ping -c 3 127.0.0.1\n") == 7
    assert "FAIL  timed out: connected, but no sshd greeted in 5 s\n" in out


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_a_host_key_that_is_not_known_is_not_accepted_unseen(hosts):
    hosts.sshd("node-a", known=False)
    check = stops_at(check_hosts(["node-a"], str(hosts.config)), "host key")
    assert check.seen == "not known on this machine yet; ssh shows it and asks"
    assert check.fix == f"ssh -o StrictHostKeyChecking=ask -F {hosts.config} node-a true"
    assert not hosts.known_hosts.exists()


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_a_host_key_that_changed_is_told_and_the_fix_removes_it(hosts):
    port = hosts.sshd("node-a", known=False)
    other = new_key(hosts.folder / "other_key")
    hosts.known_hosts.write_text(f"[127.0.0.1]:{port} {other}")
    check = stops_at(check_hosts(["node-a"], str(hosts.config)), "host key")
    assert check.seen.startswith(f"changed: [127.0.0.1]:{port} has another key than the one in ")
    remove, accept = check.fix.split(" && ")
    subprocess.run(remove, shell=True, check=True, capture_output=True)
    # What the user types, with the yes that ssh asks for.
    assert accept == f"ssh -o StrictHostKeyChecking=ask -F {hosts.config} node-a true"
    subprocess.run(accept.replace("=ask", "=accept-new"), shell=True, check=True)
    assert verdicts(check_hosts(["node-a"], str(hosts.config)), "node-a")["login"] is True


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
@pytest.mark.parametrize(
    ("setting", "seen", "fix"),
    [
        (
            "PasswordAuthentication yes",
            "does not accept a key of yours",
            "ssh-copy-id -F {} node-a",
        ),
        (
            "PasswordAuthentication no",
            "does not accept a key of yours, and takes no password (publickey)",
            "on node-a, in ~/.ssh/authorized_keys: the line that `cat ~/.ssh/id_*.pub` prints here",
        ),
    ],
    ids=["with a password", "no password"],
)
def test_a_key_that_is_refused_is_told(hosts, setting, seen, fix):
    new_key(hosts.folder / "stranger")
    hosts.sshd("node-a", setting, key="stranger")
    check = stops_at(check_hosts(["node-a"], str(hosts.config)), "login")
    assert check.seen == f"permission denied: {ME}@127.0.0.1 {seen}"
    assert check.fix == fix.format(hosts.config)


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_a_key_that_nobody_has_opened_is_told_until_an_agent_holds_it(hosts, monkeypatch):
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    hosts.sshd("node-a")
    key = hosts.folder / "id"
    assert ssh_keys.locked_key("node-a", str(hosts.config)) is None
    lock = ["ssh-keygen", "-q", "-p", "-P", "", "-N", "a passphrase", "-f", key]
    subprocess.run(lock, check=True, capture_output=True)
    check = stops_at(check_hosts(["node-a"], str(hosts.config)), "login")
    assert check.seen == (
        f"permission denied: the key {key} has a passphrase, and no agent holds it"
    )
    assert check.fix == f'eval "$(ssh-agent)" && ssh-add {key}'
    executable(hosts.folder / "bin" / "ssh-add", f"#!/bin/sh\ncat {key}.pub\n")
    monkeypatch.setenv("PATH", f"{hosts.folder / 'bin'}:{os.environ['PATH']}")
    assert ssh_keys.locked_key("node-a", str(hosts.config)) is None


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_a_key_file_that_is_open_to_others_is_told(hosts):
    hosts.sshd("node-a")
    (hosts.folder / "id").chmod(0o644)
    check = stops_at(check_hosts(["node-a"], str(hosts.config)), "login")
    assert check.seen.endswith("its permissions are 0644, expected 0600")
    assert check.fix == f"chmod 600 {hosts.folder / 'id'}"


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_words_of_ssh_that_are_not_known_are_shown_as_they_are(hosts):
    hosts.sshd("node-a", "ForceCommand (echo hello; echo this account is closed) >&2; exit 1")
    check = failed(check_hosts(["node-a"], str(hosts.config)))
    assert (check.name, check.seen) == ("login", "this account is closed")
    assert check.fix == f"ssh -v -F {hosts.config} node-a true"


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_a_login_that_hangs_ends_at_the_deadline_and_leaves_nothing(hosts):
    hosts.sshd("node-a", "ForceCommand exec cat >/dev/null")  # it lives until ssh has gone
    began = time.monotonic()
    answer = ssh_ask.ask("node-a", str(hosts.config), deadline_s=1.5)
    assert time.monotonic() - began < 3
    assert not answer.in_time
    assert not answer.values


def test_a_proxy_that_outlives_ssh_does_not_hold_the_check(hosts):
    hosts.config.write_text("Host node-a\n  ProxyCommand sleep 3\n")
    began = time.monotonic()
    answer = ssh_ask.ask("node-a", str(hosts.config), deadline_s=0.5)
    assert time.monotonic() - began < 2
    assert not answer.in_time


def test_ctrl_c_ends_the_check_and_every_ssh_at_once(hosts):
    hosts.silent("node-a")
    hosts.silent("node-b")
    command = [sys.executable, "-m", "ddp_helpers", "ssh", "check", "-F", hosts.config]
    process = subprocess.Popen(
        [*command, "node-a", "node-b"], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    began = time.monotonic()
    while len(children := psutil.Process(process.pid).children()) < 2:
        assert time.monotonic() < began + 10
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    _, err = process.communicate(timeout=3)
    assert (process.returncode, err) == (130, "Interrupted.\n")
    assert not psutil.wait_procs(children, timeout=1)[1]


# --- what is on the host --------------------------------------------------------------------------


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_an_interpreter_at_another_path_is_told(hosts):
    hosts.sshd("node-a")
    python = str(hosts.folder / "my env" / "bin" / "python")
    checks = check_hosts(["node-a"], str(hosts.config), python)
    assert verdicts(checks, "node-a") == {
        **dict.fromkeys(CHECKS, True),
        **{"python": False, "torch": None, "ddp_helpers": None},
    }
    assert failed(checks).seen == f"no {python}, expected the same path as here"
    assert failed(checks).fix.startswith(f"ssh -F {hosts.config} node-a ")


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_an_interpreter_that_does_not_run_is_told_with_its_last_words(hosts):
    hosts.sshd("node-a")
    python = str(executable(hosts.folder / "bin" / "python", "#!/bin/sh\necho no libc >&2; exit 1"))
    check = failed(check_hosts(["node-a"], str(hosts.config), python))
    assert (check.name, check.seen) == ("python", f"{python} does not run: no libc")


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
@pytest.mark.parametrize("version", ["2.0.1", "2.0.1+cpu", ""])
def test_another_version_is_told_and_the_one_to_install(hosts, monkeypatch, version):
    hosts.sshd("node-a")
    here = {"torch": "9.8.7+cpu", "ddp_helpers": ssh_ask.versions()["ddp_helpers"]}
    monkeypatch.setattr("ddp_helpers.launch.ssh_check.versions", lambda: here)
    answers = {"python": "runs", "torch": version, "ddp_helpers": here["ddp_helpers"]}
    lines = "".join(f"echo ddp_helpers:{name}={value}\n" for name, value in answers.items())
    python = str(executable(hosts.folder / "bin" / "python", f"#!/bin/sh\n{lines}"))
    check = failed(check_hosts(["node-a"], str(hosts.config), python))
    assert check.name == "torch"
    assert check.seen == f"{version or 'not installed'}, expected 9.8.7+cpu"
    assert check.fix == (
        f"ssh -F {hosts.config} node-a {python} -m pip install torch==9.8.7+cpu"
        " --index-url https://download.pytorch.org/whl/cpu"
    )


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_another_version_of_the_helpers_is_told_and_installed_from_the_project(hosts, monkeypatch):
    hosts.sshd("node-a")
    there = ssh_ask.versions()
    monkeypatch.setattr(
        "ddp_helpers.launch.ssh_check.versions", lambda: {**there, "ddp_helpers": "7.7"}
    )
    check = failed(check_hosts(["node-a"], str(hosts.config)))
    assert (check.name, check.seen) == ("ddp_helpers", f"{there['ddp_helpers']}, expected 7.7")
    assert check.fix.endswith(f" -m pip install -e {Path(__file__).parents[2]}")


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
def test_hosts_that_differ_are_told_where_this_machine_has_no_torch(hosts, monkeypatch):
    hosts.sshd("node-a")
    hosts.sshd("node-b", "SetEnv WHICH=2.0.1")
    monkeypatch.setattr(
        "ddp_helpers.launch.ssh_check.versions", lambda: {"torch": "", "ddp_helpers": ""}
    )
    text = (
        "#!/bin/sh\necho ddp_helpers:python=runs\necho ddp_helpers:torch=${WHICH:-2.8.0}\n"
        "echo ddp_helpers:ddp_helpers=\n"
    )
    python = str(executable(hosts.folder / "bin" / "python", text))
    checks = check_hosts(["node-a", "node-b"], str(hosts.config), python)
    check = failed(checks)
    assert (check.host, check.name, check.seen) == ("node-b", "torch", "2.0.1, expected 2.8.0")


@pytest.mark.launcher
@pytest.mark.usefixtures("needs_sshd")
@pytest.mark.parametrize(
    ("shift", "form", "seen"),
    [
        (+60, "+%s.%N", "60.0 s ahead of this machine's, expected at most 2 s"),
        (-60, "+%s.%N", "60.0 s behind this machine's, expected at most 2 s"),
        (+60, "+%s.%%N", "s ahead of this machine's, expected at most 2 s"),
        (+1, "+%s.%N", None),
    ],
    ids=["ahead", "behind", "a date that knows no %N", "one second"],
)
def test_a_clock_that_is_more_than_two_seconds_off_is_told(hosts, shift, form, seen):
    # Slow, as a busy host is: the time this takes belongs to the round trip, not to the skew.
    date = shutil.which("date")
    executable(
        hosts.folder / "bin" / "date",
        f"#!/bin/sh\nsleep 0.2\n{date} -d '{shift:+d} seconds' {form}\nsleep 0.2\n",
    )
    hosts.sshd("node-a", f"SetEnv PATH={hosts.folder / 'bin'}:/usr/bin:/bin")
    checks = check_hosts(["node-a"], str(hosts.config))
    if seen is None:
        assert not [check for check in checks if not check.ok]
        return
    check = failed(checks)
    assert check.name == "clock"
    assert check.seen.endswith(seen)
    assert check.fix == f"ssh -t -F {hosts.config} node-a sudo timedatectl set-ntp true"


# --- keys -----------------------------------------------------------------------------------------


def test_a_user_without_a_key_gets_one_and_the_command_for_each_host(capsys, tmp_path):
    folder = tmp_path / ".ssh"
    assert ssh("keys", "--folder", folder, "node-a", "node-b") == 0
    key = folder / "id_ed25519"
    assert capsys.readouterr().out == (
        f"Made {key} (it has no passphrase).\n"
        f"ssh-copy-id -i {key}.pub node-a\nssh-copy-id -i {key}.pub node-b\n"
    )
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert Path(f"{key}.pub").read_text().startswith("ssh-ed25519 ")


@pytest.mark.parametrize(
    "name", ["id_rsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk", "id_ed25519.pub"]
)
def test_a_key_that_is_there_stays_as_it_is(capsys, tmp_path, name):
    (tmp_path / name).write_text("mine")
    (tmp_path / name).chmod(0o644)
    tmp_path.chmod(0o755)
    assert ssh("keys", "--folder", tmp_path, "node-a") == 0
    key = tmp_path / name.removesuffix(".pub")
    assert capsys.readouterr().out == f"You have {key}.\nssh-copy-id -i {key}.pub node-a\n"
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"
    assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o644
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_a_key_that_came_in_between_is_not_overwritten(monkeypatch, tmp_path):
    key = tmp_path / "id_ed25519"
    key.write_text("mine")
    monkeypatch.setattr(ssh_keys, "find_key", lambda folder: None)
    with pytest.raises(ssh_keys.KeyNotMade, match="ssh-keygen made no key"):
        ssh_keys.ensure_key(tmp_path)
    assert key.read_text() == "mine"


def test_run_types_the_commands_on_every_host_and_tells_of_one_that_failed(
    capfd, monkeypatch, tmp_path
):
    executable(tmp_path / "bin" / "ssh-copy-id", '#!/bin/sh\necho "got $*"\n[ "$3" != node-a ]\n')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert ssh("keys", "--run", "--folder", tmp_path / ".ssh", "node-a", "node-b") == 1
    out = capfd.readouterr().out
    assert out.count("\ngot -i ") == 2
    assert ssh("keys", "--run", "--folder", tmp_path / ".ssh", "node-b") == 0


def test_a_user_without_a_key_is_not_sent_to_ssh_copy_id(monkeypatch, tmp_path):
    monkeypatch.setattr(ssh_text, "ssh_folder", lambda: tmp_path)
    denied = "me@node-a: Permission denied (publickey,password)."
    assert ssh_text.reason(denied, "node-a").fix == "python -m ddp_helpers ssh keys --run node-a"
    (tmp_path / "id_rsa").write_text("mine")
    assert ssh_text.reason(denied, "node-a").fix == "ssh-copy-id node-a"


# --- wrong use ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check"], "error: no host given.\nType: python -m ddp_helpers ssh check node-a node-b"),
        (["check", "me@node-a"], "error: hosts 'me@node-a': 'me@node-a' is not NAME:SLOTS"),
        (["check", "--hosts", "a:two"], "error: hosts 'a:two': 'a:two' is not NAME:SLOTS"),
        (["check", "a", "--hosts", "a"], "error: hosts given twice.\n"),
        (["check", "--hostfile", "none.txt"], "error: hostfile none.txt: No such file"),
        (["check", "-F", "none.conf", "a"], "error: none.conf not found.\nExpected ssh's config"),
        (["check", "--fast", "a"], "unrecognized arguments: --fast"),
        (["check", "--", "-oProxyCommand=x"], "'-oProxyCommand=x' is not NAME:SLOTS"),
        ([], "the following arguments are required: keys | check"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_use_is_answered_with_a_message_and_exit_status_2(capsys, words, message):
    assert ssh(*words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


def test_a_machine_without_ssh_is_told_what_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ssh("check", "node-a") == 2
    assert capsys.readouterr().err == (
        "error: ssh not found on this machine.\nInstall it with: apt-get install openssh-client\n"
    )


def test_help_answers_in_half_a_second_and_fits_on_one_screen():
    def seconds() -> float:
        began = time.monotonic()
        command = [sys.executable, "-m", "ddp_helpers", "ssh", "--help"]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert len(text.splitlines()) <= 24
        return time.monotonic() - began

    assert min(seconds() for _ in range(3)) < 0.5
