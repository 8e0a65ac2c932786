"""Costs of an engine: measured without a trace, kept on disk, measured again where that fails."""

import json
import logging
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from outdraft.control.costs import CostTable
from outdraft.control.roofline import MachineLimits
from outdraft.core.errors import ConfigError
from outdraft.core.plan import StepPlan
from outdraft.costs.file import (
    MOST_FILES,
    CostFile,
    digest,
    drafter_key,
    identity,
    target_key,
)
from outdraft.costs.table import cost_file, cost_table, default_machine, roofline
from outdraft.engine.llm import LLM
from outdraft.runner.dummy_steps import DummyStep, DummySteps
from tests.oracle.engines import engine, greedy, ids, prompts_of, run

FAMILY = "qwen2"
TABLE = CostTable.from_json(
    '{"target": {"rows": [1], "seconds": [0.5], "has_stairs": false}, "drafters": {}}'
)


def measured(llm: LLM, folder: Path, budget_s: float = math.inf) -> CostTable:
    """Without a limit of time every step is measured, however busy the machine is."""
    config = replace(llm.config, cost_table="auto")
    return cost_table(config, llm.models, llm.engine.runner, folder=folder, budget_s=budget_s)


@pytest.mark.parametrize(
    "method", ["suffix", "combined", "draft_model-tree", "eagle3", "p-eagle", "pard", "medusa"]
)
def test_measuring_leaves_an_engine_as_it_was(method: str, tmp_path: Path):
    fresh, other = engine(FAMILY, method), engine(FAMILY, method)
    table = measured(other, tmp_path)
    network = other.config.speculation.network
    assert list(table.drafters) == ([] if network is None else [str(network.source)])
    assert table.target.rows[0] == 1
    assert table.target.rows[-1] <= other.config.scheduler.max_num_batched_tokens
    assert table.host_s > 0
    for llm in (fresh, other):
        llm.engine.check_invariants()
    pools = [llm.engine.scheduler.pool for llm in (fresh, other)]
    assert pools[0].allocate(8) == pools[1].allocate(8)
    for pool in pools:
        pool.release(range(8))
    prompts = prompts_of((5, 9, 17))
    assert ids(run(other, prompts, greedy(12))) == ids(run(fresh, prompts, greedy(12)))


@pytest.mark.parametrize("max_model_len", [2, 17, 20, 32, 40])
def test_short_contexts_leave_room_for_some_steps_or_for_none(max_model_len: int, tmp_path: Path):
    llm = engine(FAMILY, "eagle3", max_model_len=max_model_len)
    table = measured(llm, tmp_path)
    assert list(table.drafters) == ["eagle3"]
    assert math.copysign(1, table.context_s) == 1  # longer texts take no less time


def test_without_time_the_prior_stands_in(tmp_path: Path):
    llm = engine(FAMILY, "eagle3")
    prior = roofline(llm.config, llm.models, llm.engine.runner, default_machine(llm.models.device))
    table = measured(llm, tmp_path, budget_s=0)
    assert table.target == prior.target
    assert table.drafters == prior.drafters


def test_the_prior_of_a_model_with_experts_counts_those_that_rows_meet():
    llm = engine("transformers/mixtral", "plain")
    target = llm.models.target
    routed = target.routed
    assert routed is not None
    hidden, width, num_layers = target.config.hidden_size, 48, target.config.num_layers
    numbers = num_layers * routed.num_experts * 3 * hidden * width
    assert routed.nbytes == 2 * numbers  # bfloat16 holds these
    machine = MachineLimits(bandwidth=1e6, peak=1e15)
    found = roofline(llm.config, llm.models, llm.engine.runner, machine).target
    met = routed.per_row / routed.num_experts
    missed_bytes = [(1 - met) ** rows * routed.nbytes for rows in found.rows]
    want = [(target.weight_bytes - missed) / 1e6 for missed in missed_bytes]
    assert found.seconds == pytest.approx(want, rel=1e-4)
    assert found.seconds[1] > 1.1 * found.seconds[0]


def test_the_rows_of_a_measured_step_differ():
    """Equal ones would all meet the same experts."""
    llm = engine(FAMILY, "plain")
    runner, plans = llm.engine.runner, list[StepPlan]()
    launch = runner.launch
    runner.launch = lambda plan: plans.append(plan) or launch(plan)
    DummySteps(runner, llm.config.scheduler, 64).run(DummyStep(4, 12))
    (plan,) = plans
    newest = [int(one.token_ids[-1]) for one in plan.admissions]
    drafts = [work.drafts.draft.token_ids for work in plan.works if work.drafts is not None]
    assert len(set(newest)) == len(newest) == 4
    assert len({int(ids[0]) for ids in drafts}) == len(drafts) == 4


@pytest.mark.parametrize(("first_runs_count", "num_runs"), [(True, [1, 1, 1]), (False, [2, 1, 2])])
def test_a_first_run_that_makes_something_ready_is_no_sample(
    first_runs_count: bool, num_runs: list[int]
):
    llm = engine(FAMILY, "plain")
    runner, plans = llm.engine.runner, list[StepPlan]()
    launch = runner.launch
    runner.launch = lambda plan: plans.append(plan) or launch(plan)
    steps = DummySteps(runner, llm.config.scheduler, 64, first_runs_count=first_runs_count)
    ready_s = 0.0
    for step, number in zip(
        (DummyStep(1, 1), DummyStep(1, 1), DummyStep(2, 4)), num_runs, strict=True
    ):
        assert sum(steps.run(step)) > 0
        assert len(plans) == number
        assert (steps.ready_s > ready_s) == (number > 1)
        plans.clear()
        ready_s = steps.ready_s


def test_a_table_is_measured_once(tmp_path: Path):
    llm = engine(FAMILY, "eagle3")
    table = measured(llm, tmp_path)
    (file,) = tmp_path.iterdir()
    assert measured(llm, tmp_path) == table
    assert file.read_text() == next(tmp_path.iterdir()).read_text()


def test_another_network_is_added_and_the_target_is_not_measured_again(tmp_path: Path):
    first, second = engine(FAMILY, "eagle3"), engine(FAMILY, "medusa")
    tables = [measured(llm, tmp_path) for llm in (first, second, first)]
    assert len(list(tmp_path.iterdir())) == 1
    assert tables[0].target == tables[1].target == tables[2].target
    assert tables[0].drafters == tables[2].drafters
    assert list(tables[1].drafters) == ["medusa"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"key": {}, "table": {}}', "\x00\xff"])
def test_a_broken_file_is_one_log_line_and_a_fresh_measurement(
    content: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    llm = engine(FAMILY, "suffix")
    table = measured(llm, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(content, "latin-1")
    with caplog.at_level(logging.WARNING):
        again = measured(llm, tmp_path)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert again.target.rows == table.target.rows
    assert CostTable.from_json(json.dumps(json.loads(file.read_text())["table"]))


def test_a_folder_that_cannot_be_written_is_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    (tmp_path / "folder").write_text("a file")
    with caplog.at_level(logging.WARNING):
        table = measured(engine(FAMILY, "suffix"), tmp_path / "folder" / "below")
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert ["not kept" in record.message for record in warnings] == [True]
    assert table.target.rows[0] == 1


def test_files_of_something_else_are_not_used(tmp_path: Path):
    file = CostFile(tmp_path, {"model": "a"})
    file.write(TABLE)
    assert file.read() == TABLE
    other = CostFile(tmp_path, {"model": "b"})
    assert other.read() is None
    other.path.write_text(file.path.read_text())
    assert other.read() is None


def test_a_table_that_turned_out_wrong_is_measured_again_at_the_next_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    llm = engine(FAMILY, "suffix")
    config = replace(llm.config, cost_table="auto")
    file = cost_file(config, llm.models, llm.engine.runner, tmp_path)
    far = replace(measured(llm, tmp_path), context_s=1.0)
    file.write(far)
    assert measured(llm, tmp_path).context_s == 1.0
    with caplog.at_level(logging.WARNING):
        file.forget()
        file.forget()  # another engine may have been first
    assert "measures again" in caplog.text
    assert measured(llm, tmp_path).context_s < 1.0


def test_keys_differ_when_any_part_does(tmp_path: Path):
    llm = engine(FAMILY, "eagle3")
    base, models = llm.config, llm.models
    scheduler, cache = base.scheduler, base.cache
    others = [
        replace(base, load_format="dummy"),
        replace(base, scheduler=replace(scheduler, max_num_seqs=3)),
        replace(base, scheduler=replace(scheduler, max_num_batched_tokens=23)),
        replace(base, cache=replace(cache, block_size=8)),
    ]
    double = engine(FAMILY, "eagle3", dtype="float64").models
    readable = engine(FAMILY, "eagle3", kernels="reference").models
    draft_model = engine(FAMILY, "draft_model").models
    keys = [
        target_key(base, models, 64),
        *(target_key(config, models, 64) for config in others),
        target_key(base, models, 65),
        target_key(base, double, 64),
        target_key(base, readable, 64),
        target_key(base, replace(models, path=tmp_path), 64),
    ]
    assert len({digest(key) for key in keys}) == len(keys)
    assert digest(target_key(base, draft_model, 64)) == digest(keys[0])  # the same target


def test_keys_of_networks_differ_when_any_part_does():
    one = engine(FAMILY, "eagle3").config.speculation.network
    tree = engine(FAMILY, "eagle3-tree").config.speculation.network
    heads = engine(FAMILY, "medusa").config.speculation.network
    assert one is not None
    assert tree is not None
    assert heads is not None
    others = [
        tree,
        heads,
        replace(one, quantization="int8"),
        replace(one, parallel_drafting=True),
        replace(one, draft_sample_method="greedy"),
        replace(one, model=heads.model),
        replace(one, model="someone/else"),
    ]
    assert len({digest(drafter_key(network)) for network in (one, *others)}) == 1 + len(others)


def test_a_checkpoint_that_was_written_again_is_another_one(tmp_path: Path):
    for name in ("model.safetensors", "config.json", "README.md"):
        (tmp_path / name).write_text(name)
    before = identity(tmp_path)
    (tmp_path / "README.md").write_text("more")
    assert identity(tmp_path) == before
    os.utime(tmp_path / "model.safetensors", ns=(0, 1))
    assert identity(tmp_path) != before
    (tmp_path / "model-2.safetensors").write_text("more")
    assert len(identity(tmp_path)) == 3


def test_a_table_can_be_told(tmp_path: Path):
    llm = engine(FAMILY, "eagle3")
    path = tmp_path / "costs.json"
    path.write_text(TABLE.to_json())
    told = replace(llm.config, cost_table=str(path))
    table = cost_table(told, llm.models, llm.engine.runner)
    assert table.target == TABLE.target
    assert list(table.drafters) == ["eagle3"]  # as the prior says
    (tmp_path / "broken.json").write_text("{}")
    for wrong in (tmp_path / "none.json", tmp_path, tmp_path / "broken.json"):
        with pytest.raises(ConfigError, match=f"cost_table '{wrong}'"):
            cost_table(replace(told, cost_table=str(wrong)), llm.models, llm.engine.runner)


@pytest.mark.parametrize("method", ["plain", "eagle3"])
def test_nothing_is_measured_that_nobody_asks_for(method: str, tmp_path: Path):
    llm = engine(FAMILY, method)
    setting = "auto" if method == "plain" else "roofline"
    config = replace(llm.config, cost_table=setting)
    table = cost_table(config, llm.models, llm.engine.runner, folder=tmp_path)
    machine = default_machine(llm.models.device)
    assert table == roofline(config, llm.models, llm.engine.runner, machine)
    assert cost_file(config, llm.models, llm.engine.runner, tmp_path).read() is None
    assert list(tmp_path.iterdir()) == []


def test_the_files_that_were_written_last_are_kept(tmp_path: Path):
    files = [CostFile(tmp_path, {"model": number}) for number in range(MOST_FILES + 3)]
    for number, file in enumerate(files):
        file.write(TABLE)
        os.utime(file.path, ns=(number, number))
    files[0].write(TABLE)
    assert len(list(tmp_path.iterdir())) == MOST_FILES
    assert files[0].read() == TABLE
    assert [file.read() for file in files[-3:]] == [TABLE] * 3
