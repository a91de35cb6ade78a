"""What a file may say and what is refused, each time with its place; and that an export reads back as the same."""

from __future__ import annotations

import json
import sys
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from saltern.apply.export import to_documents, to_list, to_yaml
from saltern.apply.planner import Mandate, plan
from saltern.apply.resources import Declaration, Kind, World, namespace_resource, tenant_resource
from saltern.apply.schema import DeclarationError, read_declaration
from saltern.apply.units import format_duration, format_exact_size, format_time, parse_duration_s, parse_time_s
from saltern.apply.yaml_tree import DEPTH_MAX, FILE_MAX_BYTES, YamlError, parse_documents
from saltern.errors import FailedPreconditionError, InvalidArgumentError
from saltern.names import NamespaceId, TenantId
from saltern.sizes import parse_size
from tests.clients.apply.test_planner import EVERYTHING, Service, any_declaration, carry_out
from tests.docs.markdown import blocks

HEAD = "apiVersion: saltern/v1\nkind: Tenant\nname: acme\n"
WHOLE = """\
# Everything that a file may say.
apiVersion: saltern/v1
kind: Tenant
name: acme
displayName: no            # a name, not a boolean
state: suspended
quota:
  dram: {reserved: 1GiB, limit: 4GiB, weight: 200}
  ssd: {limit: 16GiB}
rates:
  operationsPerSecond: 5000
  bytesPerSecond: 500MiB
  ssdWriteBytesPerSecond: 0
salt: {scope: user, rotateEvery: 30d, grace: 24h}
namespaces:
  - name: chat
    modelFingerprint: "model@1/bf16"
    blockTokens: 16
    blockBytes: 2MiB
    limits: {dram: 512MiB, ssd: none}
keys:
  - {name: ci, role: writer, displayName: CI, expires: 2027-01-01, project: web, user: bot}
  - {name: admin, role: tenant-admin, expires: never}
sharing:
  groups:
    - name: research
      namespace: chat
      invite: [blue/chat]
  accepts:
    - {group: coral/models, namespace: chat}
"""


def read(*texts: str) -> Declaration:
    documents = [one for number, text in enumerate(texts) for one in parse_documents(text.encode(), f"{number}.yaml")]
    return read_declaration(documents)


def test_a_whole_file() -> None:
    declared = read(WHOLE)
    assert list(declared.tenants.items()) == [("acme", "0.yaml:4:1")]
    fields = {name.removeprefix("tenants/acme"): one.fields for (_, name), one in declared.resources.items()}
    assert fields[""] == {"display_name": "no"}
    assert fields["/state"] == {"state": "suspended"}
    assert fields["/quota/dram"] == {
        "tier": "dram", "reserved_bytes": 2**30, "limit_bytes": 2**32, "weight": 200,
    }  # fmt: skip
    assert fields["/quota/ssd"] == {"tier": "ssd", "limit_bytes": 2**34}
    assert fields["/rates"]["bytes_per_s"] == 500 * 2**20
    assert fields["/saltPolicy"] == {"scope": "user", "rotation_period_s": 30 * 86400, "grace_period_s": 86400}
    assert fields["/namespaces/chat"]["ssd_limit_bytes"] is None
    assert fields["/apiKeys/ci"]["expire_time_s"] == 1798761600
    assert fields["/apiKeys/admin"]["expire_time_s"] is None
    assert (Kind.INVITATION, "tenants/acme/sharingGroups/research/members/blue/chat") in declared.resources
    assert (Kind.MEMBERSHIP, "tenants/coral/sharingGroups/models/members/acme/chat") in declared.resources
    assert (Kind.INVITATION, "tenants/acme/sharingGroups/research") in declared.sections


@pytest.mark.parametrize(
    ("text", "place", "said"),
    [
        (HEAD + "quota:\n  dram:\n    limt: 4GiB\n", "0.yaml:6:5", "did you mean 'limit'?"),
        (HEAD + "displayname: x\n", "0.yaml:4:1", "did you mean 'displayName'?"),
        (HEAD + "zzz: x\n", "0.yaml:4:1", "has no field 'zzz'"),
        (HEAD + "name: blue\n", "0.yaml:4:1", "there twice, first in line 3"),
        (HEAD + "---\n" + HEAD, "0.yaml:7:1", "declared twice, first at 0.yaml:3:1"),
        (HEAD + "state: asleep\n", "0.yaml:4:8", "none that this version knows"),
        (HEAD + "state:\n", "0.yaml:4:7", "has no value"),
        (HEAD + "state: null\n", "0.yaml:4:8", "has no value"),
        (HEAD + "state: [active]\n", "0.yaml:4:8", "one value"),
        (HEAD + "quota: 4GiB\n", "0.yaml:4:8", "is a mapping"),
        (HEAD + "quota: {dram: {limit: lots}}\n", "0.yaml:4:23", "whole number of bytes"),
        (HEAD + "quota: {dram: {limit: -1}}\n", "0.yaml:4:23", "whole number of bytes"),
        (HEAD + "quota: {dram: {reserved: 2, limit: 1}}\n", "0.yaml:4:15", "above its limit"),
        (HEAD + "quota: {dram: {weight: 1001}}\n", "0.yaml:4:24", "1 to 1000"),
        (HEAD + "quota: {dram: {weight: 0x10}}\n", "0.yaml:4:24", "1 to 1000"),
        (HEAD + "namespaces: {chat: {}}\n", "0.yaml:4:13", "is a list"),
        (HEAD + "namespaces: [chat]\n", "0.yaml:4:14", "each namespace is a mapping"),
        (HEAD + "namespaces: [{name: chat}, {name: chat}]\n", "0.yaml:4:28", "declared twice"),
        (HEAD + "namespaces: [{blockTokens: 16}]\n", "0.yaml:4:14", "has no name"),
        (HEAD + "keys: [{name: ci, role: node}]\n", "0.yaml:4:25", "write one of"),
        (HEAD + "keys: [{name: ci, role: writer, secret: x}]\n", "0.yaml:4:33", "no field 'secret'"),
        (HEAD + "keys: [{name: ci, role: tenant-admin, user: x}]\n", "0.yaml:4:8", "only writers and readers"),
        (HEAD + "keys: [{name: ci, expires: soon}]\n", "0.yaml:4:28", "is no time"),
        (HEAD + "salt: {grace: 1w}\n", "0.yaml:4:15", "is not a duration"),
        (HEAD + "sharing: {groups: [{name: g, namespace: chat, invite: [chat]}]}\n", "0.yaml:4:56", "names no"),
        (HEAD + "sharing: {groups: [{name: g, namespace: chat, invite: [acme/chat]}]}\n", "0.yaml:4:56", "first"),
        ("apiVersion: saltern/v2\nkind: Tenant\nname: a\n", "0.yaml:1:13", "did you mean saltern/v1?"),
        ("kind: Tenant\nname: a\n", "0.yaml:1:1", "apiVersion is missing"),
        ("- 1\n", "0.yaml:1:1", "a document is a mapping"),
        ("apiVersion: saltern/v1\nkind: Tenant\nname: UPPER\n", "0.yaml:3:7", "not a valid identifier"),
        ("apiVersion: saltern/v1\nkind: Tenant\n", "0.yaml:1:1", "tenant has no name"),
    ],
)  # fmt: skip
def test_every_problem_has_its_place_and_what_to_write(text: str, place: str, said: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        read(text)
    shown = f"{caught.value.message} {caught.value.hint} {caught.value.metadata.get('problems', '')}"
    assert place in shown and said in shown


def test_all_problems_of_all_files_are_told_at_once() -> None:
    with pytest.raises(DeclarationError) as caught:
        read(HEAD + "stat: active\nsalt: {scope: world}\n", HEAD.replace("acme", "Blue"))
    assert [str(problem.mark) for problem in caught.value.problems] == ["0.yaml:4:1", "0.yaml:5:15", "1.yaml:3:7"]
    assert "(and 2 more)" in caught.value.message


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"a: &x [1]\nb: *x\n", "anchors"),
        (b"a: [" * 200, "deeper"),
        (b"a: !!python/object/apply:os.system [x]\n", "tag"),
        (b"!!binary a: b\n", "tag"),
        (b"a: {<<: {b: c}}\n", "merge keys"),
        (b"? [a]\n: b\n", "a key is a list"),
        (b"a: b: c\n", "no YAML"),
        (b"a: [b\n", "no YAML"),
        (b"a:\n\t- b\n", "no YAML"),
        (b"a: '\x01'\n", "no YAML"),
        (b"a: \xff\n", "not UTF-8"),
        (b"a" * (FILE_MAX_BYTES + 1), "larger than"),
        (b"%YAML 9.9\n---\na: b\n", "no YAML"),
    ],
    ids=lambda value: value.decode("latin-1")[:24] if isinstance(value, bytes) else "",
)
def test_what_is_no_plain_yaml_is_refused_with_its_line(content: bytes, said: str) -> None:
    with pytest.raises(YamlError) as caught:
        parse_documents(content, "x.yaml")
    assert caught.value.message.startswith("x.yaml:")
    assert said in caught.value.message
    assert caught.value.mark.line >= 1


def test_a_bomb_of_aliases_is_refused_before_it_grows() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(YamlError, match="anchors"):
        parse_documents("\n".join(lines).encode(), "bomb.yaml")


@given(st.binary(max_size=200) | st.text(alphabet="ab:- \n[]{},&*!#'\"|>%?\t", max_size=80).map(str.encode))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    try:
        documents = parse_documents(content, "x.yaml")
        read_declaration(documents)
    except InvalidArgumentError as error:
        assert "x.yaml:" in error.message


def test_the_deepest_file_that_the_schema_has_is_below_the_limit() -> None:
    assert DEPTH_MAX >= 8
    assert read(json.dumps({"apiVersion": "saltern/v1", "kind": "List", "items": [
        {"apiVersion": "saltern/v1", "kind": "Tenant", "name": "acme", "sharing": {"groups": [
            {"name": "g", "namespace": "chat", "invite": ["blue/chat"]}]}},
    ]})).tenants  # fmt: skip


def test_without_pyyaml_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(FailedPreconditionError) as caught:
        parse_documents(b"a: b", "x.yaml")
    assert "saltern[apply]" in caught.value.hint


def test_what_is_exported_reads_back_as_the_same() -> None:
    for seed in range(150):
        service = Service(World({}))
        carry_out(service, any_declaration(Random(seed)), EVERYTHING, seed)
        documents = to_documents(service.world())
        for text in (to_yaml(documents), json.dumps(to_list(documents))):
            again = plan(read(text), service.world(), Mandate(prune=True, prune_tenants=True))
            assert not again.steps and not again.conflicts and not again.waiting, f"seed {seed}\n{text}"
            assert not again.not_declared, f"seed {seed}"


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40).filter(str.isprintable))
@settings(max_examples=200, deadline=None)
def test_any_name_for_people_survives_an_export(name: str) -> None:
    tenant = TenantId("acme")
    fields = {"model_fingerprint": name, "block_tokens": 1, "block_bytes": 1}
    limits = {"dram_limit_bytes": None, "ssd_limit_bytes": 0}
    namespace = namespace_resource(tenant, NamespaceId("no"), {**fields, **limits})
    world = World.of([tenant_resource(tenant, {"display_name": name}), namespace])
    again = plan(read(to_yaml(to_documents(world))), world, EVERYTHING)
    assert not again.steps and again.unchanged == 2


@given(st.integers(0, 2**53), st.integers(0, 10 * 366 * 86400), st.integers(0, 2**32))
@settings(max_examples=200, deadline=None)
def test_numbers_read_back_exactly(size_bytes: int, duration_s: int, time_s: int) -> None:
    assert parse_size(format_exact_size(size_bytes)) == size_bytes
    if duration_s < 10**9:
        assert parse_duration_s(format_duration(duration_s)) == duration_s
    assert parse_time_s(format_time(time_s)) == time_s


@pytest.mark.parametrize(
    ("page", "heading"), [("docs/apply.md", "What a file may say"), ("docs/operating.md", "Tenants as files")]
)
def test_the_files_in_the_documentation_are_read(page: str, heading: str) -> None:
    (text,) = blocks(page, heading, "yaml")
    assert list(read(text).tenants) == ["acme"]
