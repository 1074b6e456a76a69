"""The variables that hvdrun passes to other hosts, and how they combine with those there."""

from __future__ import annotations

import pytest

from sirtaki.bindings.topology import RankPlacement
from sirtaki.runner.launch.environment import RankEnvironment, exported, merge_login


@pytest.mark.parametrize(
    "name",
    ["PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "MY_TOKEN", "NCCL_DEBUG", "VIRTUAL_ENV", "CUDA_HOME"],
)
def test_what_the_job_needs_goes_over(name: str) -> None:
    assert exported({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    "name",
    [
        *("HOME", "HOSTNAME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "SHLVL", "_", "DISPLAY", "TMPDIR"),
        *(
            "SSH_AUTH_SOCK",
            "SSH_CONNECTION",
            "XDG_RUNTIME_DIR",
            "DBUS_SESSION_BUS_ADDRESS",
            "BASH_FUNC_module%%",
        ),
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_CUDA_VISIBLE_DEVICES", "SIRTAKI_KEY", "SIRTAKI_KEY_FILE"),
    ],
)
def test_what_belongs_to_a_login_or_a_machine_stays(name: str) -> None:
    assert exported({name: "x"}) == {}


def test_what_was_sent_lies_over_the_logins() -> None:
    login = {"HOME": "/home/there", "LANG": "C", "PATH": "/usr/bin:/opt/there"}
    assert merge_login({"LANG": "de", "PATH": "/venv/bin::/usr/bin"}, login) == {
        "HOME": "/home/there",
        "LANG": "de",
        "PATH": "/venv/bin:/usr/bin:/opt/there",
    }
    assert merge_login({}, {}) == {}


def test_a_ranks_place_overrules_what_is_there() -> None:
    environment = RankEnvironment("j", "unix:@x", "/key", 7.0, {"A": "added"})
    found = environment.of(RankPlacement(3, 8, 1, 2, 1, 4), {"A": "base", "SIRTAKI_RANK": "9", "B": "base"})
    assert (found["A"], found["B"], found["SIRTAKI_RANK"], found["HOROVOD_LOCAL_SIZE"]) == (
        "added",
        "base",
        "3",
        "2",
    )
    assert (found["SIRTAKI_CROSS_RANK"], found["SIRTAKI_CROSS_SIZE"], found["SIRTAKI_JOB"]) == ("1", "4", "j")
