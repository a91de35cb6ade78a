"""Where vLLM reads ids of media in a request's body: the gateway has to know every such place."""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.utils import construct_input_messages
from vllm.renderers.chat_utils import _MEDIA_CONTENT_PART_KEYS

from saltern.keys import SaltKey
from saltern.vllm.gateway_bodies import MEDIA_FIELDS, rename_media

PART = {"type": "input_image", "image_url": None, "detail": "auto", "uuid": "of-another"}


def test_i2_what_vllm_takes_for_a_part_with_media_the_gateway_does_too() -> None:
    assert MEDIA_FIELDS == _MEDIA_CONTENT_PART_KEYS


def test_i2_ids_in_what_a_tool_put_out_are_under_the_callers_salt() -> None:
    body: dict[str, Any] = {
        "input": [
            {"type": "message", "role": "user", "content": [dict(PART)]},
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "c"},
            {"type": "function_call_output", "call_id": "c", "output": [dict(PART)]},
        ]
    }

    def messages() -> str:
        return str(construct_input_messages(request_input=ResponsesRequest.model_validate(body).input))

    assert messages().count("of-another") == 2, "vLLM reads both as parts of messages"
    rename_media(body, SaltKey(bytes(32)))
    assert messages().count("uuid") == 2 and "of-another" not in messages()
