"""How long prefill, decoding and transfers take: a model by floating-point operations, stated in :data:`STATEMENT`.

``flops(n) = linear * n + attention * n^2`` is that of Mooncake (FAST'25, section 3: ``l * (a n^2 d + b n d^2)``). With
p tokens of the prompt cached, what is left of it is ``flops(n) - flops(p)``.
"""

from __future__ import annotations

from typing import Final

from saltern.replay.profiles import HardwareProfile, ModelProfile

STATEMENT: Final = (
    "prefill of n tokens of which the first p are cached takes overhead + (linear (n - p) + attention (n^2 - p^2)) / "
    "(GPUs x peak x efficiency); an engine does one prefill at a time and waits for its transfer; decoding does not "
    "slow prefill (as on engines of their own) and takes weights / (GPUs x memory bandwidth x efficiency) a token"
)


def prefill_flops(model: ModelProfile, tokens: int, cached_tokens: int = 0) -> float:
    """Floating-point operations of a prompt of ``tokens`` whose first ``cached_tokens`` are there."""
    new_tokens = tokens - cached_tokens
    pairs = new_tokens * (tokens + cached_tokens)
    return model.linear_flops_per_token * new_tokens + model.attention_flops_per_pair * pairs


class TimeModel:
    """Seconds of one model on one machine; constants are worked out once, since every request asks.

    Attributes:
        decode_token_s: of one token of an answer.
    """

    def __init__(self, model: ModelProfile, hardware: HardwareProfile) -> None:
        flops_per_s = hardware.peak_flops_per_s * hardware.efficiency
        self._linear_s = model.linear_flops_per_token / flops_per_s
        self._attention_s = model.attention_flops_per_pair / flops_per_s
        self._overhead_s = hardware.overhead_s
        memory_bytes_per_s = hardware.gpus * hardware.memory_bytes_per_s * hardware.decode_efficiency
        self.decode_token_s = model.weight_bytes / memory_bytes_per_s if memory_bytes_per_s else 0.0

    def prefill_s(self, tokens: int, cached_tokens: int = 0) -> float:
        """Of a prompt whose first ``cached_tokens`` are there. The last token is always computed: it makes the first
        of the answer."""
        if cached_tokens >= tokens:
            cached_tokens = max(0, tokens - 1)
        new_tokens = tokens - cached_tokens
        pairs = new_tokens * (tokens + cached_tokens)
        return self._overhead_s + self._linear_s * new_tokens + self._attention_s * pairs

    def decode_s(self, tokens: int) -> float:
        """Of an answer after its first token."""
        return self.decode_token_s * max(0, tokens - 1)
