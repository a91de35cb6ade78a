"""Traces of LLM requests as block ids: read from files in the Mooncake form, or generated from a seed."""

from saltern.traces.agents import AgentWorkload, generate_agent_requests
from saltern.traces.mooncake import BLOCK_TOKENS, Trace, TraceRequest, encode_jsonl, file_sha256, read_trace

__all__ = [
    "BLOCK_TOKENS",
    "AgentWorkload",
    "Trace",
    "TraceRequest",
    "encode_jsonl",
    "file_sha256",
    "generate_agent_requests",
    "read_trace",
]
