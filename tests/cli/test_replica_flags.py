"""What flags about replicas ask of Ray Serve, and which of them are refused."""

import sys
from pathlib import Path

import msgspec
import pytest

from outdraft.cli.app import app
from outdraft.cli.command import num_physical_cores
from outdraft.cli.serve import ReplicasOptions, ServerOptions, replica_plan
from outdraft.cli.serving import NO_RAY, check_replicas, with_local_paths
from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.ranks.launch import load_on_ranks
from outdraft.server.replicas.router import ReplicaPlan
from tests.cli.pair import pair
from tests.server.metrics.scripted import INFO


def plan(*, has_gpus: bool = False, environ: dict[str, str] | None = None, **flags) -> ReplicaPlan:
    engine = {name: flags.pop(name) for name in ("device", "tensor_parallel_size") if name in flags}
    return replica_plan(
        ReplicasOptions(**flags),
        ServerOptions(),
        EngineConfig.from_options(model="m", **engine),
        environ or {},
        has_gpus,
    )


def test_without_autoscaling_there_are_as_many_as_asked_for():
    fixed = plan(data_parallel_size=3)
    assert (fixed.num_replicas, fixed.min_replicas, fixed.max_replicas) == (3, 3, 3)


def test_autoscaling_begins_with_the_size_and_stays_within_its_bounds():
    scaled = plan(data_parallel_size=2, min_replicas=1, max_replicas=5, target_requests=8.0)
    assert (scaled.num_replicas, scaled.min_replicas, scaled.max_replicas) == (2, 1, 5)
    assert scaled.target_requests == 8.0
    assert (scaled.upscale_delay_s, scaled.downscale_delay_s) == (30.0, 600.0)
    hasty = plan(max_replicas=2, upscale_delay=0.0, downscale_delay=1.5)
    assert (hasty.upscale_delay_s, hasty.downscale_delay_s) == (0.0, 1.5)


@pytest.mark.parametrize("bounds", [{"min_replicas": 3}, {"max_replicas": 1}])
def test_a_size_outside_of_its_bounds_is_refused(bounds):
    with pytest.raises(ConfigError, match="at least --min-replicas"):
        plan(data_parallel_size=2, **bounds)


def test_replicas_share_the_cores_of_a_machine():
    share = max(1, num_physical_cores() // 2)
    shared = plan(data_parallel_size=2)
    assert (shared.num_cpus, shared.environ["OMP_NUM_THREADS"]) == (share, str(share))
    chosen = plan(data_parallel_size=2, replica_cpus=6)
    assert (chosen.num_cpus, chosen.environ["OMP_NUM_THREADS"]) == (6, "6")
    said = plan(data_parallel_size=2, environ={"OMP_NUM_THREADS": "5"})
    assert said.environ["OMP_NUM_THREADS"] == "5"
    assert shared.environ["GOMP_SPINCOUNT"]


def test_a_replica_on_gpus_has_one_for_each_rank():
    one = plan(has_gpus=True)
    assert (one.num_gpus, one.num_cpus) == (1, 1)
    assert plan(has_gpus=True, tensor_parallel_size=2).num_gpus == 2
    assert plan(has_gpus=True, device="cpu").num_gpus == 0


@pytest.mark.parametrize(
    ("server", "replicas", "message"),
    [
        ({"restart_engine": True}, {"data_parallel_size": 2}, "--restart-engine"),
        ({"profiler_config": "{}"}, {"max_replicas": 2}, "--profiler-config"),
        ({}, {"min_replicas": 1}, "--min-replicas"),
    ],
)
def test_flags_without_a_meaning_are_refused(server, replicas, message):
    config = EngineConfig.from_options(model="m")
    with pytest.raises(ConfigError, match=message):
        check_replicas(config, ServerOptions(**server), ReplicasOptions(**replicas))
    check_replicas(config, ServerOptions(), ReplicasOptions())


def test_ranks_of_replicas_share_a_machine():
    spread = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    config = EngineConfig.from_options(model="m", **spread)
    check_replicas(config, ServerOptions(), ReplicasOptions())
    with pytest.raises(ConfigError, match="ranks of a replica share its machine"):
        check_replicas(config, ServerOptions(), ReplicasOptions(data_parallel_size=2))


def test_without_ray_the_flag_says_what_to_install(command, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "outdraft.server.replicas.deployment", raising=False)
    result = command.invoke(app, ["serve", "--port", "0", "--data-parallel-size", "2"])
    assert result.exit_code == 2
    assert NO_RAY in " ".join(result.output.split())


def test_without_ray_ranks_on_a_cluster_say_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "outdraft.ranks.ray_hosts", raising=False)
    spread = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "device": "cpu"}
    with pytest.raises(ConfigError, match=r"pip install 'outdraft\[ray\]'"):
        load_on_ranks(EngineConfig.from_options(model=str(pair().target), **spread))


def test_of_what_a_replica_elsewhere_names_no_weights_are_downloaded(tmp_path: Path, monkeypatch):
    """The front end encodes prompts: it needs the tokenizer, and the model's configuration."""
    asked = []

    def snapshot_download(name: str, **options) -> str:
        asked.append((name, "*.safetensors" in options["ignore_patterns"]))
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    config = EngineConfig(model="some/model", tokenizer="some/tokenizer")
    found = with_local_paths(msgspec.structs.replace(INFO, tokenizer_path="/elsewhere"), config)
    assert asked == [("some/model", True), ("some/tokenizer", True)]
    assert (found.model_path, found.tokenizer_path) == (
        str(tmp_path / "some/model"),
        str(tmp_path / "some/tokenizer"),
    )
