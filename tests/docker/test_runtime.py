"""How a built image's settings become a container's; that it runs is what ``make test-docker`` shows."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.docker.compose import Mount
from tests.docker.container import Wishes
from tests.docker.runtime import BuiltImage, runtime_config, seccomp

CONFIG = {
    "User": "10001:10001",
    "Entrypoint": ["saltern", "serve", "node"],
    "Cmd": [],
    "Env": ["PATH=/opt/saltern/bin:/bin", "URL=a=b"],
    "WorkingDir": "/var/lib/saltern",
    "Volumes": {"/var/lib/saltern": {}},
}


@pytest.fixture
def image(tmp_path: Path) -> BuiltImage:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "passwd").write_text("root:x:0:0::/root:/bin/sh\nsaltern:x:10001:10001::/var/lib/saltern:\n")
    (tmp_path / "var" / "lib" / "saltern").mkdir(parents=True)
    (tmp_path / "var" / "lib" / "saltern").chmod(0o700)
    return BuiltImage(tmp_path, CONFIG)


@pytest.fixture
def profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    rule = {"action": "SCMP_ACT_ALLOW", "args": [], "includes": {}, "excludes": {}}
    content: dict[str, Any] = {
        "defaultAction": "SCMP_ACT_ERRNO",
        "defaultErrnoRet": 38,
        "archMap": [
            {"architecture": "SCMP_ARCH_X86_64", "subArchitectures": ["SCMP_ARCH_X86"]},
            {"architecture": "SCMP_ARCH_AARCH64", "subArchitectures": ["SCMP_ARCH_ARM"]},
        ],
        "syscalls": [
            {**rule, "names": ["read", "mbind"]},
            {**rule, "names": ["bpf"], "includes": {"caps": ["CAP_SYS_ADMIN"]}},
            {**rule, "names": ["bpf"], "excludes": {"caps": ["CAP_SYS_ADMIN"]}, "action": "no", "errnoRet": 1},
            {**rule, "names": ["s390_runtime_instr"], "includes": {"arches": ["s390"]}},
            {**rule, "names": ["arch_prctl"], "includes": {"arches": ["amd64", "arm64"]}},
        ],
    }
    file = tmp_path / "seccomp.json"
    file.write_text(json.dumps(content))
    monkeypatch.setattr("tests.docker.runtime.SECCOMP", file)
    return content


def test_a_container_has_no_right_and_its_image_s_user_environment_and_home(
    image: BuiltImage, profile: dict[str, Any]
) -> None:
    config = runtime_config(image, Wishes("node-1", environment={"A": "1"}))
    process = config["process"]
    assert process["user"] == {"uid": 10001, "gid": 10001} and process["noNewPrivileges"]
    assert not any(process["capabilities"].values()) and config["root"]["readonly"]
    assert {"HOME=/var/lib/saltern", "URL=a=b", "A=1"} <= set(process["env"])
    assert process["args"] == CONFIG["Entrypoint"] and config["hostname"] == "node-1"
    assert config["linux"]["seccomp"]["defaultErrnoRet"] == profile["defaultErrnoRet"]


@pytest.mark.usefixtures("profile")
def test_a_declared_volume_is_new_with_the_image_s_owner_unless_the_service_names_one(image: BuiltImage) -> None:
    def mounted(wishes: Wishes) -> dict[str, Any]:
        found = [
            mount for mount in runtime_config(image, wishes)["mounts"] if mount["destination"] == CONFIG["WorkingDir"]
        ]
        assert len(found) == 1
        return dict(found[0])

    own = mounted(Wishes("node-1"))
    assert own["type"] == "tmpfs" and "mode=700" in own["options"] and f"uid={os.getuid()}" in own["options"]
    bound = mounted(Wishes("node-1", binds=[("/somewhere", Mount("state", "/var/lib/saltern", is_read_only=True))]))
    assert bound["source"] == "/somewhere" and "ro" in bound["options"]


def test_a_service_s_entrypoint_takes_the_image_s_command_away() -> None:
    assert Wishes("x").words(["a"], ["b"]) == ["a", "b"]
    assert Wishes("x", command=["c"]).words(["a"], ["b"]) == ["a", "c"]
    assert Wishes("x", entrypoint=["d"]).words(["a"], ["b"]) == ["d"]


def test_system_calls_are_those_of_a_container_without_capabilities_on_this_machine(profile: dict[str, Any]) -> None:
    made = seccomp(profile)
    assert [(rule["names"], rule.get("errnoRet")) for rule in made["syscalls"]] == [
        (["read"], None),
        (["bpf"], 1),
        (["arch_prctl"], None),
    ]
    assert made["defaultAction"] == "SCMP_ACT_ERRNO" and made["architectures"][0].endswith(os.uname().machine.upper())
