"""The model of `bench scale`: closed forms, the same message by message, and steps with known answers."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hvdlite.bench import cluster, cost, replay, transfers
from hvdlite.bench import step as steps
from hvdlite.bench.calibrate import expected, fit
from hvdlite.bench.cluster import Cluster
from hvdlite.bench.cost import Link
from hvdlite.bench.step import Gradient, Step

MIB = 2**20
FREE = 1e30  # bytes/s of a reduction that takes no time
SLOW = Cluster(bandwidth=1e8, latency=1e-3, reduce_bandwidth=FREE, per_batch=0.0)
STEP = Step("made up", 1.0, 2.0, 0.5, (Gradient(1.5, 10), Gradient(2.0, 20), Gradient(3.0, 30)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 100])
def test_a_ring_of_single_chunks_takes_its_textbook_time(ranks):
    # 2 (P - 1) (latency + S / (P bandwidth)): each chunk waits for the one before.
    seconds = cost.ring_seconds(1e6, ranks, Link(1e-3, 1e8), chunk=MIB, reduce_bandwidth=FREE)
    assert seconds == pytest.approx(2 * (ranks - 1) * (1e-3 + 1e6 / ranks / 1e8))


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_ring_of_many_chunks_hides_all_latencies_but_the_last(ranks):
    seconds = cost.ring_seconds(1e9, ranks, Link(1e-3, 1e8), chunk=MIB, reduce_bandwidth=FREE)
    assert seconds == pytest.approx(2 * (ranks - 1) / ranks * 1e9 / 1e8 + 1e-3)


def test_a_reduction_behind_single_chunks_counts_in_the_first_half_only():
    seconds = cost.ring_seconds(4e5, 4, Link(0.0, 1e8), chunk=MIB, reduce_bandwidth=1e8)
    assert seconds == pytest.approx(6 * 1e-3 + 3 * 1e-3)


@pytest.mark.parametrize(("ranks", "steps_"), [(2, 1), (3, 3), (4, 2), (7, 4), (8, 3), (4096, 12)])
def test_doubling_takes_a_latency_for_each_power_of_two(ranks, steps_):
    assert cost.doubling_seconds(0, ranks, SLOW) == pytest.approx(steps_ * 1e-3)


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 16])
@pytest.mark.parametrize("nbytes", [1, 1000, 300_001, 3 * MIB, 40 * MIB])
def test_closed_forms_agree_with_every_message(algorithm, ranks, nbytes):
    machine = dataclasses.replace(SLOW, reduce_bandwidth=1e9)
    every = transfers.allreduce_seconds(nbytes, ranks, machine, algorithm)
    closed = cost.allreduce_seconds(nbytes, ranks, machine, algorithm)
    if algorithm == "doubling" and ranks in (3, 7):  # the hand-over may hide a latency: the form is an upper bound
        assert every * 0.95 <= closed <= every * 1.05 + machine.latency
    else:
        assert closed == pytest.approx(every, rel=0.05)


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
def test_closed_forms_agree_with_every_message_through_an_oversubscribed_switch(algorithm):
    machine = dataclasses.replace(SLOW, nodes_per_switch=4, oversubscription=4.0, switch_latency=5e-4)
    every = transfers.allreduce_seconds(8 * MIB, 16, machine, algorithm)
    plain = cost.allreduce_seconds(8 * MIB, 16, SLOW, algorithm)
    assert cost.allreduce_seconds(8 * MIB, 16, machine, algorithm) == pytest.approx(every, rel=0.1)
    assert every > (2 * plain if algorithm == "doubling" else 0.99 * plain)


@pytest.mark.parametrize("algorithm", ["ring", "doubling"])
def test_closed_forms_agree_with_every_message_when_ranks_share_a_link(algorithm):
    machine = dataclasses.replace(SLOW, ranks_per_node=4, node_bandwidth=1e10, node_latency=1e-6)
    every = transfers.allreduce_seconds(4 * MIB, 16, machine, algorithm)
    assert cost.allreduce_seconds(4 * MIB, 16, machine, algorithm) == pytest.approx(every, rel=0.1)


def test_two_messages_through_one_link_follow_each_other():
    machine = dataclasses.replace(SLOW, ranks_per_node=2)
    programs = [iter([transfers.Send(2, 1e8)]), iter([transfers.Send(3, 1e8)])]
    programs += [iter([transfers.Receive(0)]), iter([transfers.Receive(1)])]
    assert transfers.run(programs, machine) == pytest.approx([0.0, 0.0, 1.001, 2.001])


def test_a_message_that_nobody_sends_is_named():
    with pytest.raises(RuntimeError, match=r"\[\(1, 0\)\]"):
        transfers.run([iter([transfers.Receive(1)]), iter([])], SLOW)


def test_hierarchical_sends_what_a_host_must_and_beats_a_flat_ring_in_latency():
    machine = Cluster(ranks_per_node=8, bandwidth=1e9, latency=1e-4, reduce_bandwidth=FREE, node_bandwidth=FREE)
    big = cost.allreduce_seconds(1000 * MIB, 64, machine, "hierarchical")
    assert big == pytest.approx(2 * 7 / 8 * 1000 * MIB / 1e9, rel=0.01)
    small = [cost.allreduce_seconds(64 * 1024, 64, machine, way) for way in ("hierarchical", "ring")]
    assert small[0] < small[1] / 2


def test_auto_is_the_fastest_way():
    for nbytes in (1, 10_000, MIB, 100 * MIB):
        ways = [cost.allreduce_seconds(nbytes, 64, SLOW, way) for way in cost.ALGORITHMS if way != "auto"]
        assert cost.allreduce_seconds(nbytes, 64, SLOW) == min(ways)


def test_one_rank_and_no_bytes_cost_nothing():
    assert cost.allreduce_seconds(MIB, 1, SLOW) == 0
    assert cost.allreduce_seconds(0, 8, SLOW) == 0


def test_batches_run_one_after_the_other_and_take_what_is_ready():
    # The first gradient runs from 1.5 to 4.5; the others have come meanwhile, and run together.
    outcome = replay.simulate(STEP, lambda nbytes: 3.0)
    assert (outcome.batches, outcome.communicating, outcome.exposed) == (2, 6.0, 4.5)
    assert outcome.seconds == 3.0 + 4.5 + 0.5
    assert outcome.hidden == pytest.approx(0.25)


def test_a_batch_is_no_larger_than_the_fusion_threshold():
    sizes = []
    replay.simulate(STEP, lambda nbytes: sizes.append(nbytes) or 3.0, fusion=40)
    assert sizes == [10, 20, 30]


def test_communication_that_ends_before_backward_does_is_hidden():
    outcome = replay.simulate(Step("s", 1.0, 2.0, 0.5, (Gradient(1.5, 10),)), lambda nbytes: 0.5)
    assert (outcome.seconds, outcome.exposed, outcome.hidden) == (3.5, 0.0, 1.0)


def test_a_prediction_for_one_rank_is_the_recorded_step():
    prediction = replay.predict(STEP, 1, SLOW)
    assert (prediction.efficiency, prediction.outcome.seconds) == (1.0, STEP.seconds)


def test_efficiency_falls_with_ranks_and_rises_with_links():
    step = steps.even_step("s", 0.1, [4 * MIB] * 25)
    by_rate = [
        [replay.predict(step, n, Cluster(ranks_per_node=8, bandwidth=rate)).efficiency for n in (16, 256, 4096)]
        for rate in (25e9 / 8, 100e9 / 8)
    ]
    assert by_rate[0] == sorted(by_rate[0], reverse=True)
    assert all(slow < fast for slow, fast in zip(*by_rate, strict=True))


def test_jitter_lets_all_wait_for_the_slowest_of_many():
    alone, many = (replay.predict(STEP, n, SLOW, jitter=0.1).outcome.seconds for n in (2, 1024))
    assert STEP.seconds < alone < many
    assert replay.expected_largest(2) == pytest.approx(0.564, abs=0.03)  # exactly 1 / sqrt(pi)
    assert replay.expected_largest(1) == 0


def test_the_spread_of_the_recorded_step_is_the_jitter_unless_one_is_given():
    spread = dataclasses.replace(STEP, spread=0.1)
    assert replay.predict(spread, 64, SLOW) == replay.predict(STEP, 64, SLOW, jitter=0.1)
    assert replay.predict(spread, 64, SLOW, jitter=0.0) == replay.predict(STEP, 64, SLOW)
    assert steps.bucketed(spread, 30).spread == steps.stretched(spread, 2.0).spread == 0.1


@pytest.mark.parametrize(("ranks", "latencies"), [(2, 0), (16, 0), (17, 9), (64, 11), (4096, 23)])
def test_agreeing_grows_with_the_logarithm_of_the_hosts(ranks, latencies):
    assert replay.agreement_seconds(ranks, SLOW) == pytest.approx(latencies * SLOW.latency)
    assert replay.agreement_seconds(ranks, dataclasses.replace(SLOW, ranks_per_node=4096)) == 0


def test_buckets_are_ready_with_their_last_gradient_and_lose_no_byte():
    joined = steps.bucketed(STEP, 30)
    assert joined.gradients == (Gradient(2.0, 30), Gradient(3.0, 30))
    assert steps.bucketed(STEP, 0) == STEP


def test_a_step_survives_its_file(tmp_path):
    for step in (STEP, dataclasses.replace(STEP, spread=0.03)):
        steps.write(step, tmp_path / "step.json")
        assert steps.read(tmp_path / "step.json") == step


@pytest.mark.parametrize("text", ["", "[]", '{"format": 2}', '{"format": 1, "name": "s"}'])
def test_a_file_that_is_no_step_is_named(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json: not a recorded step"):
        steps.read(tmp_path / "x.json")


def test_a_gradient_after_backward_is_refused():
    with pytest.raises(ValueError, match="after its backward"):
        Step("s", 1.0, 1.0, 0.0, (Gradient(2.5, 1),))
    with pytest.raises(ValueError, match="order"):
        Step("s", 1.0, 1.0, 0.0, (Gradient(1.5, 1), Gradient(1.0, 1)))


def test_a_cluster_survives_its_file(tmp_path):
    made = Cluster(ranks_per_node=4, bandwidth=12.5e9, latency=7e-6, nodes_per_switch=16, oversubscription=3.0)
    (tmp_path / "made.toml").write_text(cluster.render(made, "two\nlines"))
    found = cluster.read(tmp_path / "made.toml")
    for field in dataclasses.fields(Cluster):
        assert getattr(found, field.name) == pytest.approx(getattr(made, field.name))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"link": {"bandwith": "1 Gbit/s"}}, "Did you mean link.bandwidth"),
        ({"link": {"bandwidth": "fast"}}, "bandwidth = 'fast': 'fast' is not a rate"),
        ({"nodes": {"ranks_per_node": 0}}, "ranks_per_node=0"),
        ({"switch": {"oversubscription": 0.5}}, "expected 1 or more"),
        ({"link": {"latency": "3"}}, "not a time"),
        ({"bandwidth": 3}, "outside of a section"),
    ],
)
def test_a_wrong_cluster_says_what_is_wrong(tables, message):
    with pytest.raises(ValueError, match=message):
        cluster.from_tables(tables)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_calibration_finds_what_the_samples_were_made_of(ranks):
    made = Cluster(bandwidth=1.2e8, latency=5e-5, per_batch=3e-4, reduce_bandwidth=FREE)
    samples = []
    for way, name, sizes in [
        ("doubling", "tree", (1024, 16384)),
        ("ring", "ring", (1024, 4 * MIB, 8 * MIB, 16 * MIB)),
    ]:
        for nbytes in sizes:
            seconds = made.per_batch + cost.allreduce_seconds(nbytes, ranks, made, way)
            samples.append(expected(name, nbytes, ranks, seconds))
    found = fit(samples)
    assert found.bandwidth == pytest.approx(made.bandwidth, rel=0.02)
    assert found.per_batch == pytest.approx(made.per_batch, rel=0.05)
    assert found.latency == pytest.approx(made.latency, rel=0.15)


def test_calibration_refuses_times_that_do_not_grow():
    with pytest.raises(ValueError, match="too busy"):
        fit([expected("ring", MIB, 2, 1.0), expected("ring", 64 * MIB, 2, 0.1)])


def test_the_file_of_a_step_is_plain_json(tmp_path):
    steps.write(STEP, tmp_path / "step.json")
    assert json.loads((tmp_path / "step.json").read_text())["gradients"][0] == {"ready": 1.5, "nbytes": 10}
