"""prepare: bring a database to a release and a configuration, as a job of its own, before gateways start on it.

Knows nothing of requests, or of gateways that run.
"""

from dataclasses import dataclass

from conformal_arbitrage.gateway.auth import admit_first_key
from conformal_arbitrage.gateway.pairs import check_policies, pairs_of
from conformal_arbitrage.gateway.policy_table import PolicyTable
from conformal_arbitrage.gateway.server import secret_of
from conformal_arbitrage.live.build import Extras, Models
from conformal_arbitrage.live.config import Config
from conformal_arbitrage.live.database import open_record
from conformal_arbitrage.store.base import PolicyVersion
from conformal_arbitrage.store.schema import StoreSchema


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What was done to a database.

    Attributes:
        schema: its tables, now and before.
        key: the id of the first key, if it was created.
        installed: the versions that certificate files became.
    """

    schema: StoreSchema
    key: str | None
    installed: tuple[PolicyVersion, ...]


async def prepare(config: Config) -> Preparation:
    """Migrate the tables, create the first key, and install the certificate files that changed; call no model.

    Raises:
        ArbitrageError: a certificate cannot be used with these models, or the database cannot be used.
    """
    check_policies(config)
    secret = secret_of(config)
    store = await open_record(config)
    try:
        await store.seal(everything=True)
        key = await admit_first_key(store)
        policies = PolicyTable(config, store, pairs_of(Models(config, Extras(keyless=True))), secret)
        installed = await policies.install_files()
        return Preparation(schema=store.schema, key=key, installed=tuple(installed))
    finally:
        await store.close()
