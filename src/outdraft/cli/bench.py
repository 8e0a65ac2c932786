"""`outdraft bench`: load tests of servers, of the engine in this process, and its methods."""

import asyncio
import math
import os
import time
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outdraft.cli.bench_methods import methods
from outdraft.cli.bench_sweep import sweep
from outdraft.cli.command import Command, check_output, progress, use_physical_cores
from outdraft.cli.options import EngineOptions, engine_config, numbers, takes_options
from outdraft.config.benchmarks import Dataset, Endpoint, LatencyPlan, TrafficPlan
from outdraft.config.engine import SchedulerConfig
from outdraft.config.fields import flag
from outdraft.core.errors import ConfigError
from outdraft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from outdraft.engine.llm import LLM

bench = typer.Typer(
    help="Measure a server under load, or the engine alone.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
bench.command(cls=Command)(methods)
bench.command(cls=Command)(sweep)

ModelFlag = Annotated[
    str | None, typer.Option(help="Directory or hub name; default: the embedded model.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """Numbers and files that are kept; names as in vLLM.

    Attributes:
        percentile_metrics: Some of ttft, tpot, itl, e2el, client_queue_time.
        metric_percentiles: As in 50,90,99.
        save_result: As JSON.
        save_detailed: With every request's times and text.
        result_filename: Default: made of rate, model and date.
    """

    percentile_metrics: str = "ttft,tpot,itl,e2el"
    metric_percentiles: str = "99"
    save_result: bool = flag("--save-result", default=False)
    save_detailed: bool = flag("--save-detailed", default=False)
    result_dir: Path = Path()
    result_filename: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Measurement of an engine of this process; names as in vLLM.

    Attributes:
        disable_detokenize: Make no text of the tokens.
        output_json: File for the result.
        max_seconds: For the whole measurement; what is not done then has failed.
    """

    temperature: float = 0.0
    disable_detokenize: bool = flag("--disable-detokenize", default=False)
    output_json: Path | None = None
    max_seconds: float = flag(default=600, min=1)


@bench.command(cls=Command)
@takes_options
def serve(
    *,
    server: Endpoint,
    dataset: Dataset,
    num_prompts: Annotated[int, typer.Option(min=1)] = 100,
    sweep: Annotated[str | None, typer.Option(metavar="1,2,4")] = None,
    max_seconds: Annotated[float, typer.Option(min=1)] = 600,
    traffic: TrafficPlan,
    result: ResultOptions,
    tokenizer: str | None = None,
) -> None:
    """Load test of any OpenAI-compatible server.

    With --request-rate latencies count from the scheduled arrival, so a server that stalls cannot
    hide it. With --max-concurrency alone they count from the sending.

    Args:
        tokenizer: The served model's; random and sharegpt need it.

    Length:
        num_prompts: Prompts of each run.
        sweep: A run for each concurrency, and a plot.
        max_seconds: For the whole measurement; what is not done then has failed.
    """
    from outdraft.bench.report import as_table, check_installed

    check_installed("httpx", *(("matplotlib", "plotext") if sweep is not None else ()))
    from outdraft.bench.serve import check_reporting, run_load, serve_report, with_model
    from outdraft.bench.workloads import load_requests, load_tokenizer

    metrics = result.percentile_metrics.split(",")
    percentiles = numbers(result.metric_percentiles, "--metric-percentiles", float)
    check_reporting(metrics, percentiles)
    if result.save_result or sweep is not None:
        name = result.result_filename or "result.json"  # else it has the model's name, and the date
        check_output(result.result_dir / name, "--result-dir")
    endpoint = replace(server, ignore_eos=server.ignore_eos or dataset.name == "random")
    runs = traffics_of(traffic, sweep)
    each = traffic.num_warmups + num_prompts
    vocabulary = load_tokenizer(tokenizer) if tokenizer is not None else None
    requests = load_requests(dataset, each * len(runs), traffic.seed, vocabulary)
    deadline_s = time.monotonic() + max_seconds
    endpoint = asyncio.run(with_model(endpoint))
    results: list[dict[str, Any]] = []
    for place, one in enumerate(runs):
        part = requests[place * each : (place + 1) * each]
        with progress("requests", num_prompts, "req") as bar:
            run = asyncio.run(run_load(endpoint, part, one, deadline_s, lambda _: bar.update()))
        report = serve_report(run, part, one, metrics, percentiles, result.save_detailed)
        results.append(report)
        typer.echo(as_table("Serving Benchmark Result", report))
    where = {
        "base_url": endpoint.url,
        "endpoint": endpoint.endpoint,
        "model_id": endpoint.model,
        "dataset_name": dataset.name,
    }
    _keep(where, results, None if sweep is not None else traffic, result)
    if not any(one["completed"] for one in results):
        raise typer.Exit(1)


@bench.command(cls=Command)
@takes_options
def latency(
    model: ModelFlag = None,
    *,
    profile: Annotated[bool, typer.Option("--profile")] = False,
    plan: LatencyPlan,
    run: RunOptions,
    dataset: Dataset,
    engine: EngineOptions,
) -> None:
    """Time batches of a fixed size, one after the other, without a server.

    Every request generates its full number of tokens. Prompts are not cached unless asked for.

    Args:
        profile: Trace one more batch with torch's profiler.
    """
    from outdraft.bench.in_process import measure_latency
    from outdraft.bench.workloads import load_requests

    check_output(run.output_json, "--output-json")
    llm = _llm(model, engine, plan.batch_size)
    count = plan.num_requests + plan.batch_size * profile
    requests = load_requests(dataset, count, engine.seed or 0, llm.models.tokenizer)
    params = _params(run)
    measured = requests[: plan.num_requests]
    deadline_s = time.monotonic() + run.max_seconds
    with progress("iterations", plan.num_iters) as bar:
        result = measure_latency(
            llm.engine, measured, plan, params, deadline_s, lambda _: bar.update()
        )
    _show_in_process("Latency Benchmark Result", result, llm, dataset, run.output_json)
    if profile:
        from outdraft.bench.in_process import run_batch
        from outdraft.engine.profiler import traced

        trace = (run.output_json or Path("outdraft-latency.json")).with_suffix(".trace.json")
        with traced(llm.engine, trace):
            until_s = time.monotonic() + run.max_seconds
            run_batch(llm.engine, requests[plan.num_requests :], params, until_s)
        typer.echo(f"trace of one batch, for chrome://tracing or ui.perfetto.dev: {trace}")


@bench.command(cls=Command)
@takes_options
def throughput(
    model: ModelFlag = None,
    *,
    num_prompts: Annotated[int, typer.Option(min=1)] = 24,
    max_num_seqs: Annotated[int, typer.Option(min=1)] = SchedulerConfig().max_num_seqs,
    run: RunOptions,
    dataset: Dataset,
    engine: EngineOptions,
) -> None:
    """Complete many prompts that are all there at once, without a server.

    Every request generates its full number of tokens. Prompts are not cached unless asked for.

    Args:
        max_num_seqs: Running requests.
    """
    from outdraft.bench.in_process import measure_throughput
    from outdraft.bench.workloads import load_requests

    check_output(run.output_json, "--output-json")
    llm = _llm(model, engine, max_num_seqs)
    requests = load_requests(dataset, 1 + num_prompts, engine.seed or 0, llm.models.tokenizer)
    deadline_s = time.monotonic() + run.max_seconds
    params = _params(run)
    with progress("requests", num_prompts, "req") as bar:
        result = measure_throughput(
            llm.engine, requests[0], requests[1:], params, deadline_s, lambda _: bar.update()
        )
    _show_in_process("Throughput Benchmark Result", result, llm, dataset, run.output_json)


def traffics_of(traffic: TrafficPlan, sweep: str | None) -> list[TrafficPlan]:
    """One, or one for each concurrency of a sweep."""
    if sweep is None:
        return [traffic]
    if traffic.max_concurrency is not None or not math.isinf(traffic.request_rate):
        raise ConfigError(
            "--sweep chooses the concurrency: leave out --max-concurrency and --request-rate"
        )
    levels = numbers(sweep, "--sweep", int)
    return [replace(traffic, max_concurrency=level) for level in levels]


def _params(run: RunOptions) -> SamplingParams:
    """Sampling of every request, but for its length."""
    detokenize = not run.disable_detokenize
    return SamplingParams(temperature=run.temperature, ignore_eos=True, detokenize=detokenize)


def _keep(
    where: dict[str, Any],
    results: list[dict[str, Any]],
    traffic: TrafficPlan | None,
    options: ResultOptions,
) -> None:
    """Write what was asked for; a sweep, whose traffic is None, is one file and has its plots."""
    from outdraft.bench.report import (
        environment,
        sweep_picture,
        sweep_plot,
        sweep_table,
        write_json,
    )

    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    whole = {"date": now, "backend": "openai", **where}
    whole |= results[0] if traffic is not None else {"sweep": results}
    name = options.result_filename
    if name is None:
        arrivals = "sweep" if traffic is None else f"{traffic.request_rate:g}qps"
        if traffic is not None and traffic.max_concurrency is not None:
            arrivals += f"-concurrency{traffic.max_concurrency}"
        name = f"openai-{arrivals}-{Path(where['model_id']).name}-{now}.json"
    path = options.result_dir / name
    if traffic is None:
        picture = path.with_suffix(".png")
        sweep_picture(results, picture)
        typer.echo(f"{sweep_table(results)}\n\n{sweep_plot(results)}\nplot: {picture}")
    if options.save_result:
        write_json(path, whole | {"environment": environment()})
        typer.echo(f"result: {path}")


def _llm(model: str | None, options: EngineOptions, max_num_seqs: int) -> "LLM":
    """An engine for batches; as in vLLM's benchmarks, prompts are not cached unless asked for."""
    config = engine_config(model, options)
    if options.enable_prefix_caching is None:
        config = replace(config, cache=replace(config.cache, enable_prefix_caching=False))
    use_physical_cores(os.environ)
    from outdraft.engine.llm import LLM

    return LLM.from_config(replace(config, scheduler=SchedulerConfig(max_num_seqs=max_num_seqs)))


def _show_in_process(
    title: str, result: dict[str, Any], llm: "LLM", dataset: Dataset, output_json: Path | None
) -> None:
    from outdraft.bench.report import as_table, compute, environment, write_json
    from outdraft.models.modules import dtype_name

    typer.echo(as_table(title, result))
    if output_json is None:
        return
    target = llm.models.target
    where = {
        "model_id": llm.config.model,
        "dtype": dtype_name(target.dtype),
        "device": str(llm.models.device),
        "speculation_methods": [str(method) for method in llm.config.speculation.methods],
        "dataset_name": dataset.name,
    }
    write_json(output_json, where | result | {"environment": environment() | compute()})
    typer.echo(f"result: {output_json}")
