"""Replicas as an application of Ray Serve: on which machines they run, and how many there are.

Ray Serve starts replicas, replaces those that die, and starts more or fewer as load comes and goes.
Requests do not pass through it: each replica has an engine process beside it, and a relay that
calls the front end.
"""

import asyncio
import logging
import os
from typing import Any
from uuid import uuid4

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from ray.serve.schema import ApplicationStatus

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.server.client import EngineProcess
from outdraft.server.replicas.router import ReplicaPlan, config_of_replica, num_wanted
from outdraft.server.replicas.switchboard import Address, FrontEndLostError, Relay

HEALTH_PERIOD_S = 2.0  # of Serve's question whether a replica lives
LEAVES_AFTER_S = 0.1  # Serve looks for requests of its own first, of which there are none
START_ATTEMPTS = 3
FRONT_END_LOST_AFTER_S = 30.0
OUTSTANDING = "outstanding_requests"

_logger = logging.getLogger(__name__)


class EngineReplica:
    """A replica of Ray Serve: a relay and its engine. It answers no requests itself."""

    async def __init__(  # Serve awaits it
        self, config: EngineConfig, plan: ReplicaPlan, address: Address
    ) -> None:
        context = serve.get_replica_context()
        self._app = context.app_name
        environ = {**os.environ, **plan.environ}
        node = ray.util.get_node_ip_address()
        own = config_of_replica(config, context.replica_tag)
        engine = EngineProcess(own, environ, plan.log_level)
        self._relay = Relay(engine, address, context.replica_tag, node, FRONT_END_LOST_AFTER_S)
        self._running = asyncio.create_task(self._run())
        await self._relay.ready

    def check_health(self) -> None:
        """Serve asks; an exception has it start another replica."""
        if self._relay.ended.is_set():
            raise RuntimeError("the engine has ended")

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The statistics that the policy gets."""
        return {OUTSTANDING: float(self._relay.num_requests)}

    async def __del__(self) -> None:  # Serve awaits it, too, before it ends the process
        await self._relay.leave()

    async def _run(self) -> None:
        try:
            await self._relay.run()
        except FrontEndLostError as error:
            # Without the front end the application is of no use, and would never end.
            _logger.error("%s: the application ends", error)
            serve.delete(self._app, _blocking=False)


def scaling_policy(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Ray Serve's question how many replicas there should be."""
    assert context.config is not None
    target: float = context.config.target_ongoing_requests
    loads = (context.aggregated_metrics or {}).get(OUTSTANDING, {})
    wanted = num_wanted(list(loads.values()), context.current_num_replicas, target)
    return wanted, {}


class Deployment:
    """One application of Ray Serve, for as long as its front end lives."""

    def __init__(self, config: EngineConfig, plan: ReplicaPlan, address: Address) -> None:
        self._name = f"outdraft-{uuid4().hex[:8]}"
        scaling = AutoscalingConfig(
            min_replicas=plan.min_replicas,
            initial_replicas=plan.num_replicas,
            max_replicas=plan.max_replicas,
            target_ongoing_requests=plan.target_requests,
            upscale_delay_s=plan.upscale_delay_s,
            downscale_delay_s=plan.downscale_delay_s,
            policy=AutoscalingPolicy(policy_function=scaling_policy),
        )
        deployment: Any = serve.deployment(
            EngineReplica,
            name="engine",
            ray_actor_options={"num_cpus": plan.num_cpus, "num_gpus": plan.num_gpus},
            health_check_period_s=HEALTH_PERIOD_S,
            graceful_shutdown_timeout_s=plan.drain_timeout_s,
            graceful_shutdown_wait_loop_s=LEAVES_AFTER_S,
            max_constructor_retry_count=START_ATTEMPTS,
            autoscaling_config=scaling,
        )
        self._application = deployment.bind(config, plan, address)

    def start(self) -> None:
        """Have Serve start the replicas. Takes seconds, and does not wait for them."""
        serve.start(proxy_location="Disabled")
        serve.run_many(
            [serve.RunTarget(self._application, name=self._name, route_prefix=None)],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def failure(self) -> str | None:
        """Why Serve has given up, if it has."""
        status = serve.status().applications.get(self._name)
        if status is not None and status.status == ApplicationStatus.DEPLOY_FAILED:
            return status.message or "it does not say why"
        return None

    def delete(self) -> None:
        """Have Serve end what is left of it."""
        serve.delete(self._name, _blocking=False)


def has_gpus() -> bool:
    """True if a machine of the cluster has a GPU."""
    return ray.cluster_resources().get("GPU", 0) > 0


def connect(address: str | None, **options: Any) -> str:
    """Join a Ray cluster; this machine's address in it.

    Args:
        address: "local": a new cluster of this machine alone; None: the one that was started on
            this machine, or that RAY_ADDRESS names, or else a new one.
        options: of ray.init.

    Raises:
        ConfigError: there is no cluster at the address.
    """
    # If a cluster begins here: else what Ray runs gives way to every other program.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"--ray-address {address}: {error}") from None
    return ray.util.get_node_ip_address()
