"""Examples of commands, shown at the end of their help and in the reference of ``docs/cli.md``.

Commands whose own help shows how they are used are not here. A test walks every command and wants an example of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: By the words of a command after ``saltern``.
EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "up": (
        "saltern up --dram 1GiB",
        "saltern up --nodes 2 --dram 1GiB --ssd 10GiB --ports auto",
        "saltern up --dram 1GiB --ssd 100GiB --engine mooncake --mooncake-master 10.0.0.5:50051",
    ),
    "serve control": (
        "saltern serve control --listen 127.0.0.1:7700 --state-dir /var/lib/saltern/control --ready-file ready.json",
    ),
    "serve node": (
        "saltern serve node --node-id node-1 --control 127.0.0.1:7700 --api-key-file node-1.key"
        " --dram-bytes 64GiB --state-dir /var/lib/saltern/node-1",
        "saltern serve node --node-id node-1 --control 127.0.0.1:7700 --api-key-file node-1.key --dram-bytes 64GiB"
        " --state-dir /var/lib/saltern/node-1 --engine mooncake --mooncake-master 10.0.0.5:50051 --ssd-bytes 1TiB",
    ),
    "serve rewrap": ("saltern serve rewrap --state-dir /var/lib/saltern/control --rotate",),
    "tenant create": ("saltern tenant create acme --display-name 'Acme Corp'",),
    "tenant list": ("saltern tenant list", "saltern tenant list -o json | jq -r '.tenants[].name'"),
    "tenant get": ("saltern tenant get acme",),
    "tenant update": ("saltern tenant update acme --display-name 'Acme AG'",),
    "tenant delete": ("saltern tenant delete acme", "saltern tenant delete acme --yes --wait"),
    "tenant suspend": ("saltern tenant suspend acme --wait",),
    "tenant resume": ("saltern tenant resume acme",),
    "tenant revoke-tokens": ("saltern tenant revoke-tokens acme --wait",),
    "namespace create": (
        "saltern namespace create acme chat --model-fingerprint qwen3-8b@1/bf16 --block-tokens 16 --block-bytes 2MiB",
    ),
    "namespace update": ("saltern namespace update acme chat --dram-limit 512MiB --ssd-limit none",),
    "namespace list": ("saltern namespace list acme",),
    "namespace get": ("saltern namespace get acme chat",),
    "namespace delete": ("saltern namespace delete acme chat --wait",),
    "quota get": ("saltern quota get acme",),
    "quota set": (
        "saltern quota set acme --dram-reserved 1GiB --dram-limit 4GiB --weight 200",
        "saltern quota set acme --bytes-per-s 500MiB --wait",
    ),
    "salt get": ("saltern salt get acme",),
    "share create": ("saltern share create acme/research --namespace chat",),
    "share list": ("saltern share list acme",),
    "share get": ("saltern share get acme/research", "saltern share get acme/research --as blue"),
    "share invite": ("saltern share invite acme/research blue/chat",),
    "share accept": ("saltern share accept acme/research blue/chat --wait",),
    "share decline": ("saltern share decline acme/research blue/chat",),
    "share leave": ("saltern share leave acme/research blue/chat --wait",),
    "share remove": ("saltern share remove acme/research blue/chat",),
    "share delete": ("saltern share delete acme/research",),
    "replay run": (
        "saltern replay run conversation.jsonl.gz --engines 8 --nodes 4 --node-memory 1TiB",
        "saltern replay run chat=conversation.jsonl.gz agent=sessions.jsonl.gz --block-tokens 512 --json report.json",
        "saltern replay run conversation.jsonl.gz --html report.html",
        "saltern replay run conversation.jsonl.gz --engine measured --nodes 2 --requests 2000 --block-bytes 64KiB",
        "saltern replay run conversation.jsonl.gz --profile mine.json --model calibrated --hardware calibrated",
    ),
    "replay calibrate": ("saltern replay calibrate ttft.csv --model qwen3-8b --hardware 1xh100 --write mine.json",),
    "plan": (
        "saltern plan conversation.jsonl.gz --hit-rate 0.3",
        "saltern plan chat=conversation.jsonl.gz agent=sessions.jsonl.gz --block-tokens 512 --slo-ttft-ms 4000",
        "saltern plan conversation.jsonl.gz --budget 20 --node-ssd 8TiB --html plan.html",
    ),
    "replay diff": (
        "saltern replay diff four-nodes.json eight-nodes.json",
        "saltern replay diff four-nodes.json eight-nodes.json --html diff.html",
    ),
    "key create": (
        "saltern key create ci --tenant acme --role writer --expires-in 90d --save ci.key",
        "saltern key create node-1 --role node --node node-1 --save node-1.key",
    ),
    "key redeem-bootstrap": (
        "saltern key redeem-bootstrap --control 127.0.0.1:7700 --token-file bootstrap-token --save admin.key",
    ),
    "key list": ("saltern key list --tenant acme",),
    "key delete": ("saltern key delete ci --tenant acme",),
    "key revoke": ("saltern key revoke ci --tenant acme --wait",),
    "token keys": ("saltern token keys",),
    "token rotate-signing-key": ("saltern token rotate-signing-key", "saltern token rotate-signing-key --now --wait"),
    "token revocations": ("saltern token revocations --tenant acme",),
    "token issue": (
        "saltern token issue --namespace chat --show",
        "saltern token issue --namespace chat --user alice --save grant.json",
    ),
    "key-encryption-key list": ("saltern key-encryption-key list",),
    "key-encryption-key remove": ("saltern key-encryption-key remove 0f3c5a7e91b2d4f6",),
    "node list": ("saltern node list",),
    "node cordon": ("saltern node cordon node-1",),
    "node drain": ("saltern node drain node-1 --wait",),
    "node uncordon": ("saltern node uncordon node-1",),
    "node remove": ("saltern node remove node-1 --yes",),
    "audit list": (
        "saltern audit list --tenant acme --limit 20",
        "saltern audit list --tenant acme --outcome denied --since 2026-11-01",
    ),
    "audit public-key": ("saltern audit public-key > audit.pub",),
    "audit rotate-checkpoint-key": ("saltern audit rotate-checkpoint-key",),
    "completion": (
        'eval "$(saltern completion bash)"       # in ~/.bashrc',
        'eval "$(saltern completion zsh)"        # in ~/.zshrc, after compinit',
        "saltern completion fish > ~/.config/fish/completions/saltern.fish",
    ),
    "doctor": ("saltern doctor", "saltern doctor -o json", "saltern doctor --console https://console.example.org/"),
    "trace show": (
        "saltern trace show conversation_trace.jsonl.gz",
        "saltern trace show client-61.csv --input-tokens 1024 --requests 100000",
    ),
    "demo": ("saltern demo --output-dir build/demo",),
    "bench": ("saltern bench --peers none --turns 3", "saltern bench --transport rdma"),
}


def examples_of(command_path: str) -> tuple[str, ...]:
    """The examples of ``saltern tenant list`` and its like; empty for a group, and where the help itself has them."""
    return EXAMPLES.get(command_path.partition(" ")[2], ())
