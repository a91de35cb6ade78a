"""vLLM's MooncakeStoreConnector for the bench: its wheel, and its master beside one engine, in a network of their own.

Mooncake's data port listens on every interface and asks nobody who they are, so that engine and master run where the
network has nothing but loopback (``unshare --net``, which takes root).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.vllm.bound import bound
from tests.vllm.stack import ROOT, free_port, wait_until

WHEEL = "mooncake-transfer-engine-non-cuda==0.3.13.post1"
_SITE = ROOT / "build" / "bench" / "vllm-mooncake"


def install() -> Path:
    """A folder for PYTHONPATH with the wheel in it and nothing else: vLLM's environment stays as it is.

    Raises:
        subprocess.CalledProcessError: pip could not.
    """
    if not (_SITE / "mooncake" / "store.so").exists():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", str(_SITE), WHEEL], check=True, timeout=300, capture_output=True)
    return _SITE


def alone(command: list[str]) -> list[str]:
    """The command in a network with nothing but loopback."""
    return ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *command]


def environment(site: Path, folder: Path) -> dict[str, str]:
    """Of the engine's process."""
    return {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)]),
        "MOONCAKE_CONFIG_PATH": str(folder / "mooncake.json"),
        "VLLM_HOST_IP": "127.0.0.1",
        "PYTHONHASHSEED": "0",
    }


@contextmanager
def running_master(folder: Path) -> Iterator[None]:
    """The master, for the time of the block, and the file that tells the connector of it. In the engine's process."""
    import mooncake

    ports = free_port(), free_port()
    binary = Path(str(mooncake.__file__)).parent / "mooncake_master"
    binary.chmod(0o755)
    options = [f"--rpc_port={ports[0]}", "--rpc_address=127.0.0.1", "--enable_metric_reporting=false"]
    options += [f"--metrics_port={ports[1]}", "--metrics_host=127.0.0.1", "--logtostderr=1"]
    config = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{ports[0]}",
        "protocol": "tcp",
        "global_segment_size": "256MB",
        "local_buffer_size": "64MB",
    }
    (folder / "mooncake.json").write_text(json.dumps(config))
    log = folder / "master.log"
    with log.open("wb") as file:
        master = subprocess.Popen(bound([str(binary), *options]), stdout=file, stderr=file)
    try:
        wait_until(lambda: _listens(ports[0]), 60, "Mooncake's master serves")
        yield
    finally:
        master.terminate()
        master.wait(30)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
