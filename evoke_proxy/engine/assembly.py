"""Builds the gateway of a configuration: all wiring of the engine is here."""

from __future__ import annotations

from dataclasses import replace

from evoke_proxy.adapters.llama.calls import ServerCalls
from evoke_proxy.adapters.llama.client import LlamaClient
from evoke_proxy.config import Config
from evoke_proxy.engine.admin.exposition import register_gauges
from evoke_proxy.engine.embedding.block_vectors import BlockVectors
from evoke_proxy.engine.routing.loaded_models import LoadedModels
from evoke_proxy.engine.routing.model_router import ModelRouter
from evoke_proxy.engine.routing.pool_gateway import PoolGateway
from evoke_proxy.engine.routing.proxy_gateway import ProxyGateway
from evoke_proxy.engine.routing.served_model import ServedModel
from evoke_proxy.engine.server.background import BackgroundTasks
from evoke_proxy.engine.server.conversations import Conversations
from evoke_proxy.engine.server.monitor import ServerMonitor
from evoke_proxy.engine.server.server import Server
from evoke_proxy.engine.server.session_worker import SessionWorker
from evoke_proxy.engine.server.slot_queue import SlotQueue
from evoke_proxy.engine.server.strategy import ServerResources, Strategies
from evoke_proxy.engine.shared import Shared
from evoke_proxy.engine.strategies.budgeted.planner import Planner
from evoke_proxy.engine.strategies.budgeted.saving_check import SavingCheck
from evoke_proxy.engine.strategies.budgeted.session_discovery import SessionDiscovery
from evoke_proxy.engine.strategies.budgeted.session_records import SessionPersistence
from evoke_proxy.engine.strategies.budgeted.slot_snapshots import SlotSnapshots
from evoke_proxy.engine.strategies.budgeted.strategy import BudgetedStrategy
from evoke_proxy.engine.strategies.budgeted.write_back import WriteBack
from evoke_proxy.engine.strategies.passthrough import Passthrough
from evoke_proxy.engine.strategies.slot_assignment import SlotAssignment
from evoke_proxy.engine.strategies.snapshots.strategy import SnapshotStrategy


def build_gateway(config: Config) -> ProxyGateway:
    """The gateway to one llama-server, or to a pool where the configuration names several."""
    gateway = build_pool(config) if config.pool.servers else build_router(config)
    register_gauges(gateway)
    return gateway


def build_pool(config: Config) -> PoolGateway:
    """The gateway to the servers of `pool.upstreams`."""
    urls = config.pool.servers
    shared = Shared(config, tuple(urls.values()))
    routers = {name: build_router(_at(config, url), shared, name) for name, url in urls.items()}
    return PoolGateway(config, shared, routers)


def build_router(config: Config, shared: Shared | None = None, name: str = "") -> ModelRouter:
    """The gateway to one URL; with `shared` it is one of several, and has a name."""
    common = shared or Shared(config)
    client = LlamaClient(config.upstream)
    return ModelRouter(
        config=config,
        shared=common,
        served=build_server(config, common, client, server_name=name),
        models=LoadedModels(
            client,
            lambda model: build_server(config, common, client, model=model, server_name=name),
        ),
        owns_shared=shared is None,
    )


def build_server(
    config: Config,
    shared: Shared,
    client: LlamaClient,
    *,
    model: str = "",
    server_name: str = "",
) -> ServedModel:
    """The server behind a client; with `model`, one model of a router."""
    client = client.bound_to(model) if model else client
    monitor = ServerMonitor(client, config, shared.metrics)
    slots = SlotQueue(config.limits)
    resources = ServerResources(
        calls=ServerCalls.of(client),
        monitor=monitor,
        slots=slots,
        conversations=Conversations(monitor.policy, config.limits.sessions, shared.body_memory),
        background=BackgroundTasks(monitor.report_failure),
        worker=SessionWorker(),
        metrics=shared.metrics,
        feed=shared.feed,
        is_stopping=lambda: shared.draining or slots.is_closed,
    )
    snapshots = build_snapshots(config, shared, resources)
    records = SessionPersistence(
        home=client.url,
        slot_snapshots=None if model else build_slot_snapshots(resources, snapshots),
        conversations=resources.conversations,
        embedding=shared.embedding,
        homes=shared.homes,
        discovery=SessionDiscovery(resources.conversations, resources.slots),
    )
    strategies = Strategies(
        budgeted=build_budgeted(shared, resources, records),
        snapshots=snapshots,
        passthrough=Passthrough(resources),
    )
    return ServedModel(
        server=Server(resources, strategies),
        repository=shared.repository,
        records=records,
        embedding=shared.embedding,
        server_name=server_name,
    )


def build_budgeted(
    shared: Shared, resources: ServerResources, records: SessionPersistence
) -> BudgetedStrategy:
    """The strategy for a patched server."""
    vectors = BlockVectors(shared.embedding, resources.conversations)
    return BudgetedStrategy(
        server=resources,
        slots=SlotAssignment(resources),
        planner=Planner(resources, vectors, records),
        records=records,
        write_back=WriteBack(
            metrics=resources.metrics,
            slots=resources.slots,
            tasks=resources.background,
            records=records,
        ),
        vectors=vectors,
    )


def build_snapshots(
    config: Config, shared: Shared, resources: ServerResources
) -> SnapshotStrategy | None:
    """The strategy for an unpatched server; None without a directory for snapshots.

    Its background work ends before that of others.
    """
    if shared.repository is None:
        return None
    return SnapshotStrategy(
        config=config.snapshots,
        repository=shared.repository,
        server=resources,
        tasks=BackgroundTasks(),
    )


def build_slot_snapshots(
    resources: ServerResources, snapshots: SnapshotStrategy | None
) -> SlotSnapshots | None:
    """Whole slots of a patched server as files; None without a directory for snapshots."""
    if snapshots is None:
        return None
    return SlotSnapshots(
        probe=snapshots.probe,
        transfers=snapshots.transfers,
        repository=snapshots.repository,
        saving=SavingCheck(snapshots.repository, resources.slots),
        conversations=resources.conversations,
        metrics=resources.metrics,
    )


def _at(config: Config, url: str) -> Config:
    return replace(config, upstream=replace(config.upstream, url=url))
