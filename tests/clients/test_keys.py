"""Key derivation: no two argument lists share an encoding, no two scopes share a salt, no secret shows."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from saltern.errors import InvalidArgumentError
from saltern.keys import (
    NOT_NARROWED,
    BlockHash,
    BlockKeyDeriver,
    Narrowing,
    RootSecret,
    SaltKey,
    SaltScope,
    derive_salt_key,
    frame,
)
from saltern.names import NamespaceId, TenantId

ROOT = RootSecret(b"r" * 32)
parts = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.binary(max_size=20) | st.integers(0, 2**64 - 1),
    max_size=6,
).map(tuple)


@given(parts, parts)
@example((b"a",), ("a",))
@example((1,), (b"\1" + bytes(7),))
@example(("a", "b"), ("ab",))
def test_i2_frames_are_equal_only_for_equal_arguments(one: tuple[object, ...], other: tuple[object, ...]) -> None:
    # Types count: 1 is not True, "a" is not b"a".
    same = one == other and [type(part) for part in one] == [type(part) for part in other]
    assert (frame(*one) == frame(*other)) == same  # type: ignore[arg-type]


def test_i2_parts_that_are_written_like_the_inside_of_a_frame_are_one_part_all_the_same() -> None:
    """Names that run into each other: a type and a value, a whole frame, or its beginning, inside of a name."""
    assert frame("a", "b") != frame("asb") and frame(b"a", b"b") != frame(b"abb")
    for one in (("a", "b"), (b"a", b"b"), ("user", "ann", 7), ("", ""), (0, 0)):
        inside = frame(*one)
        for cut in range(len(inside) + 1):
            assert frame(*one) != frame(inside[:cut]) != frame(inside[:cut], inside[cut:])


@given(parts, parts)
def test_i2_no_frame_is_a_prefix_of_another_of_as_many_parts(
    one: tuple[object, ...], other: tuple[object, ...]
) -> None:
    """Concatenation stays unambiguous: what follows a frame cannot be taken for a part of it."""
    a, b = frame(*one), frame(*other)  # type: ignore[arg-type]
    if len(one) == len(other) and a != b:
        assert not a.startswith(b) and not b.startswith(a)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("a", "b"), ("ab",)),
        (("a", "b"), ("a\0b",)),
        (("a", ""), ("a",)),
        (("a",), (b"a",)),
        ((0,), (b"\0" * 8,)),
        (("1",), (1,)),
        (("a", b"b"), ("a", "b")),
    ],
)
def test_i2_the_known_traps_are_told_apart(one: tuple[object, ...], other: tuple[object, ...]) -> None:
    assert frame(*one) != frame(*other)  # type: ignore[arg-type]


@pytest.mark.parametrize("part", [True, -1, 2**64, 1.5, None, ["a"], "\ud800", bytearray(b"a")])
def test_what_has_no_encoding_is_refused(part: object) -> None:
    with pytest.raises(InvalidArgumentError):
        frame(part)  # type: ignore[arg-type]


names = st.sampled_from(["a", "b", "ab", "a-b"])
scopes = st.tuples(
    names, names, st.sampled_from(SaltScope), st.sampled_from(["", "a", "b", "tenant"]), st.integers(0, 3)
)


def salt_of(scope: tuple[str, str, SaltScope, str, int]) -> SaltKey:
    tenant, namespace, kind, scope_id, epoch = scope
    return derive_salt_key(
        ROOT, tenant=TenantId(tenant), namespace=NamespaceId(namespace), scope=kind, scope_id=scope_id, epoch=epoch
    )


@given(scopes, scopes)
def test_i2_every_scope_has_a_salt_of_its_own(
    one: tuple[str, str, SaltScope, str, int], other: tuple[str, str, SaltScope, str, int]
) -> None:
    assert (salt_of(one) == salt_of(other)) == (one == other)


texts = st.sampled_from(["", "a", "b", "ab", "user", "project", "s\x08", "i"]) | st.text(max_size=6)
narrowings = st.builds(Narrowing, *(texts.filter(lambda text: text.isascii() or text.isprintable()) for _ in range(3)))
combinations = st.tuples(
    names, names, narrowings, st.sampled_from([SaltScope.TENANT, SaltScope.NAMESPACE]), st.integers(0, 3)
)


def salt_narrowed(combination: tuple[str, str, Narrowing, SaltScope, int]) -> SaltKey:
    tenant, namespace, narrowing, widest, epoch = combination
    scope, scope_id = narrowing.of_scope(widest)
    return derive_salt_key(
        ROOT, tenant=TenantId(tenant), namespace=NamespaceId(namespace), scope=scope, scope_id=scope_id, epoch=epoch
    )


@given(combinations, combinations)
def test_i2_no_two_tenants_namespaces_combinations_of_names_and_epochs_share_a_salt(
    one: tuple[str, str, Narrowing, SaltScope, int], other: tuple[str, str, Narrowing, SaltScope, int]
) -> None:
    """Under one root; each epoch has another besides. The widest scope counts only where nothing is named."""

    def identity(combination: tuple[str, str, Narrowing, SaltScope, int]) -> object:
        tenant, namespace, narrowing, widest, epoch = combination
        return tenant, namespace, narrowing, widest if narrowing == NOT_NARROWED else None, epoch

    assert (salt_narrowed(one) == salt_narrowed(other)) == (identity(one) == identity(other))


def test_i2_no_combination_is_another_ones_scope_id() -> None:
    """Several names are framed as bytes, and no text that a caller gives, such as that very frame, is bytes."""
    both = Narrowing(project="p", user="u")
    scope, scope_id = both.of_scope(SaltScope.TENANT)
    assert isinstance(scope_id, bytes)
    pasted = Narrowing(user=scope_id.decode("latin-1"))

    assert pasted.of_scope(SaltScope.TENANT)[0] == scope
    assert salt_narrowed(("a", "a", both, SaltScope.TENANT, 1)) != salt_narrowed(
        ("a", "a", pasted, SaltScope.TENANT, 1)
    )


def test_salts_of_two_roots_differ() -> None:
    other = derive_salt_key(
        RootSecret(b"R" * 32),
        tenant=TenantId("a"),
        namespace=NamespaceId("a"),
        scope=SaltScope.TENANT,
        scope_id="",
        epoch=1,
    )
    assert other != salt_of(("a", "a", SaltScope.TENANT, "", 1))


@given(
    st.binary(max_size=8), st.binary(min_size=1, max_size=8), st.binary(max_size=8), st.binary(min_size=1, max_size=8)
)
def test_i2_fingerprint_and_hash_cannot_run_into_each_other(f1: bytes, h1: bytes, f2: bytes, h2: bytes) -> None:
    salt = SaltKey(b"s" * 32)
    one = BlockKeyDeriver(salt, f1).derive(BlockHash(h1))
    other = BlockKeyDeriver(salt, f2).derive(BlockHash(h2))
    assert (one == other) == ((f1, h1) == (f2, h2))
    assert len(one) == 32


@pytest.mark.parametrize("block_hash", [b"", b"x" * 65, "text", None])
def test_hashes_out_of_range_are_refused(block_hash: object) -> None:
    with pytest.raises(InvalidArgumentError):
        BlockKeyDeriver(SaltKey(b"s" * 32), b"").derive(block_hash)  # type: ignore[arg-type]


@pytest.mark.parametrize("salt", [b"", b"s" * 31, b"s" * 33, "s" * 32])
def test_salts_of_another_length_are_refused(salt: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        BlockKeyDeriver(salt, b"")  # type: ignore[arg-type]
    assert "sss" not in str(caught.value)


def test_a_deriver_shows_no_salt() -> None:
    assert "s" * 4 not in repr(BlockKeyDeriver(SaltKey(b"s" * 32), b""))
