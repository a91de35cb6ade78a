"""Weights are told apart by their content, wherever they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from saltern.errors import NotFoundError
from saltern.vllm.weights import adapter_digest, weights_digest


def _model(folder: Path, content: bytes = b"weights", name: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def test_the_same_weights_in_another_folder_are_the_same(tmp_path: Path) -> None:
    assert weights_digest(_model(tmp_path / "a")) == weights_digest(_model(tmp_path / "b"))


def test_other_weights_at_the_same_path_are_others_also_when_the_old_digest_is_remembered(tmp_path: Path) -> None:
    model, cache = _model(tmp_path / "a"), tmp_path / "cache"
    first = weights_digest(model, cache)
    assert weights_digest(model, cache) == first
    _model(model, b"Weights")
    assert weights_digest(model, cache) != first


def test_a_remembered_digest_is_used_and_a_touched_file_is_read_again(tmp_path: Path) -> None:
    model, cache = _model(tmp_path / "a"), tmp_path / "cache"
    first = weights_digest(model, cache)
    [remembered] = cache.iterdir()
    assert cache.stat().st_mode & 0o077 == 0
    remembered.write_text("0" * 64)
    planted = weights_digest(model, cache)
    assert planted != first, "the remembered digest was not used"
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert weights_digest(model, cache) == first
    remembered.write_text("not a digest")
    assert weights_digest(model, cache) == first


def test_a_folder_that_cannot_hold_digests_costs_nothing_but_time(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert weights_digest(_model(tmp_path / "a"), blocked / "cache") == weights_digest(tmp_path / "a")


def test_copies_in_an_older_format_do_not_matter(tmp_path: Path) -> None:
    alone = weights_digest(_model(tmp_path / "a"))
    assert weights_digest(_model(_model(tmp_path / "b"), b"pickle", "pytorch_model.bin")) == alone


def test_a_link_is_what_it_links_to(tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    blob.write_bytes(b"weights")
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "model.safetensors").symlink_to(blob)
    assert weights_digest(linked) == weights_digest(_model(tmp_path / "a"))


def test_no_weights_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="weights_digest"):
        weights_digest(tmp_path)


def test_an_adapter_is_its_weights_and_its_configuration(tmp_path: Path) -> None:
    one = _model(tmp_path / "one", b"low rank", "adapter_model.safetensors")
    same = _model(tmp_path / "same", b"low rank", "adapter_model.safetensors")
    assert adapter_digest(one) == adapter_digest(same)
    _model(same, b'{"lora_alpha": 32}', "adapter_config.json")
    assert adapter_digest(one) != adapter_digest(same)
    with pytest.raises(NotFoundError):
        adapter_digest(tmp_path / "nowhere")
