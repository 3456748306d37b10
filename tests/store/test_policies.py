import asyncio

import pytest

from conformal_arbitrage.calibration.certificate import document_sha256
from conformal_arbitrage.errors import OptionError, StoreError
from conformal_arbitrage.store import keys, policies

DIGEST = "0123456789abcdef" * 4


async def test_installed_versions_count_from_one_and_the_newest_is_active(store):
    assert await store.run(policies.active) == []
    assert await store.change_count() == 0
    first = await store.run(policies.install, "support", {"alpha": 0.1}, by="ann")
    second = await store.run(policies.install, "support", {"alpha": 0.2}, by="bob")
    other = await store.run(policies.install, "sales", {"alpha": 0.3}, by="ann")
    assert [(v.version, v.active, v.installed_by) for v in (first, second, other)] == [
        (1, True, "ann"), (2, True, "bob"), (1, True, "ann"),
    ]  # fmt: skip
    assert await store.run(policies.active) == [other, second]
    assert [(v.version, v.active) for v in await store.run(policies.history, "support")] == [(2, True), (1, False)]
    assert await store.change_count() == 3


async def test_repeated_rollbacks_go_further_back_until_something_is_installed(store):
    async def back():
        version = await store.run(policies.rollback, "support", by="ann")
        return None if version is None else (version.version, version.certificate["n"])

    assert await back() is None
    for n in (1, 2, 3):
        await store.run(policies.install, "support", {"n": n}, by="ann")
    assert await back() == (4, 2)
    await store.run(policies.install, "support", {"n": 5}, by="ann")
    assert await back() == (6, 2)
    assert await back() == (7, 1)
    count = await store.change_count()
    assert await back() is None
    assert await store.change_count() == count == 7
    assert [v.certificate["n"] for v in await store.run(policies.history, "support")] == [1, 2, 5, 2, 3, 2, 1]


async def test_concurrent_installations_never_share_a_version_number(where, opened):
    stores = [opened(where), opened(where)]
    await stores[0].run(policies.install, "support", {}, by="ann")
    calls = [
        store.run(policies.install, "support", {}, by="ann")
        if k % 3
        else store.run(policies.rollback, "support", by="ann")
        for k in range(15)
        for store in stores
    ]
    versions = [version for version in await asyncio.gather(*calls) if version is not None]
    assert sorted(version.version for version in versions) == [*range(2, len(versions) + 2)]
    assert await stores[1].change_count() == len(versions) + 1


async def test_a_key_is_stored_as_its_digest_and_can_be_revoked(store, sql):
    await store.run(keys.create, id="k1", sha256=DIGEST, scope="review", label="Ann")
    key = await store.run(keys.find, DIGEST)
    assert (key.id, key.scope, key.label, key.revoked) == ("k1", "review", "Ann", None)
    assert await store.run(keys.find, "f" * 64) is None
    assert not await store.run(keys.revoke, "k2")
    assert await store.run(keys.revoke, "k1")
    revoked = (await store.run(keys.find, DIGEST)).revoked
    assert revoked >= key.created
    assert await store.run(keys.revoke, "k1")
    assert [k.revoked for k in await store.run(keys.list_all)] == [revoked]


async def test_a_key_itself_is_refused_and_so_is_a_duplicate(store):
    with pytest.raises(OptionError, match="never the key") as caught:
        await store.run(keys.create, id="k1", sha256="sk-secret", scope="call", label="")
    assert "sk-secret" not in str(caught.value)
    await store.run(keys.create, id="k1", sha256=DIGEST, scope="call", label="")
    for id, digest in (("k1", "f" * 64), ("k2", DIGEST)):
        with pytest.raises(StoreError, match="already exists"):
            await store.run(keys.create, id=id, sha256=digest, scope="call", label="")


def document(
    relaxation=0.3,
    *,
    step=None,
    after=None,
    models="small",
    log="log",
    stops=None,
    groups=None,
    alpha=0.1,
    loss="regret",
    source=None,
):
    """What matters of a certificate for whether it was chosen."""
    ancestry = None if step is None else {"step": step, "predecessor_sha256": after and document_sha256(after)}
    whole = {"type": "threshold", "relaxation": relaxation, "boundary_u": None}
    each = {name: {"relaxation": value, "boundary_u": None} for name, value in (groups or {}).items()}
    return {
        "rule": whole if groups is None else {"type": "by_group", "groups": each},
        "promise": {"alpha": alpha} if stops is None else {"alpha": alpha, "stops": stops},
        "loss": {"type": loss, "bound": 1.0},
        "provenance": {"identities": {"primary": models} | ({} if source is None else {"group": {"source": source}})},
        "evidence": {"log_sha256": log},
        "ancestry": ancestry,
    }


FIRST = document(0.3)
DEARER = document(0.5, step="scheduled", after=FIRST)
CHEAPER = document(0.1, step="scheduled", after=FIRST)
DEAREST = document(0.7, step="scheduled", after=CHEAPER)
NET = document(0.3, loss="net")
NET_DEARER = document(0.5, loss="net", step="scheduled", after=NET)
BY_GROUP = document(groups={"a": 0.3, "b": 0.4})
DEARER_FOR_B = document(groups={"a": 0.3, "b": 0.5}, step="scheduled", after=BY_GROUP)
DIAL = document(0.3, stops=[1, 2])
RENEWED_DIAL = document(0.5, stops=[1, 2], log="rows", step="scheduled", after=DIAL)


@pytest.mark.parametrize(
    ("before", "installed", "preferred"),
    [
        ([FIRST], document(0.1), None),  # nothing was scheduled
        ([FIRST, DEARER], FIRST, 2),
        ([FIRST, DEARER], document(0.4, log="another"), 2),
        ([FIRST, DEARER], document(None), None),  # it defers everything
        ([FIRST, DEARER], document(0.5), None),
        ([FIRST, DEARER], document(0.1, models="large"), None),
        ([FIRST, DEARER], document(groups={"": 0.1}, source="metadata.team"), 2),  # groups make no other models
        ([FIRST, DEARER], document(0.2, step="scheduled", after=DEARER), None),  # the schedule's own
        ([FIRST, DEARER], document(0.2, step="scheduled", after=FIRST), 2),  # one made earlier, installed by hand
        ([FIRST, DEARER, FIRST], document(0.4, step="scheduled", after=FIRST), None),
        ([FIRST, DEARER, FIRST], document(0.35, step="tightened", after=FIRST), 2),
        ([FIRST, DEARER, FIRST], document(0.6, step="tightened", after=FIRST), None),
        ([FIRST, DEARER], {**document(), "rule": {"type": "learned"}}, 2),  # which defers less cannot be seen
        ([BY_GROUP, DEARER_FOR_B], BY_GROUP, 2),
        ([BY_GROUP, DEARER_FOR_B], document(groups={"a": 0.3, "b": 0.5}), None),
        ([BY_GROUP, DEARER_FOR_B], document(groups={"a": 0.3}), None),
        ([BY_GROUP, DEARER_FOR_B], document(groups={"a": 0.3, "b": 0.5, "c": 0.9}), 2),
        ([DIAL, RENEWED_DIAL], document(0.2, stops=[1, 2], log="rows"), None),  # another stop of the same dial
        ([DIAL, RENEWED_DIAL], DIAL, 2),
        ([FIRST, CHEAPER, DEAREST, FIRST], CHEAPER, 3),  # a renewal put back by hand, where it once came from
        ([FIRST, DEARER], document(0.6, alpha=0.05), 2),  # it promises more than the scheduled one
        ([FIRST, DEARER], document(0.6, alpha=0.2), None),
        ([NET, NET_DEARER], document(0.9, loss="net"), 2),  # its mean may rise with what is deferred
        ([NET, NET_DEARER], document(0.5, loss="net", log="another"), None),
    ],
)  # fmt: skip
async def test_a_version_that_defers_less_than_the_scheduled_one_is_marked_as_chosen(
    store, before, installed, preferred
):
    for certificate in before:
        await store.run(policies.install, "support", certificate, by="ann")
    version = await store.run(policies.install, "support", installed, by="ann")
    assert version.preferred_to == preferred
    assert (await store.run(policies.active))[0].preferred_to == preferred
    again = await store.run(policies.prospect, "support", installed)
    assert again.preferred_to == preferred
