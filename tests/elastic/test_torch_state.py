"""TorchState: what comes back after failures and new starts, against a training that nothing disturbs."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # the first optimizer would import it, which takes seconds of a test's timeout

import hvdlite
import hvdlite.torch as hvd
from hvdlite.torch.elastic import state as states

SAMPLES = torch.arange(48, dtype=torch.float64).reshape(24, 2) / 100
BATCH = 2


@pytest.fixture(autouse=True)
def one_torch_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Stop(Exception):
    """The job ends here."""


def training(rank, epochs=3, disturb=lambda state, passes: None):
    """Train a small network elastically; `disturb(state, passes)` comes before each backward pass.

    Returns weights, samples that this rank has seen by epoch (of work that was not lost), and the epoch it began with.
    """
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).double()
    with torch.no_grad():  # threads share torch's generator of random numbers
        for number, value in enumerate(model.parameters()):
            value.copy_(torch.arange(value.numel()).reshape(value.shape).add(number + rank).sin())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    sampler = hvd.elastic.ElasticSampler(SAMPLES, seed=1)
    passes = []

    @hvd.elastic.run
    def train(state):
        begun = state.epoch
        while state.epoch < epochs:
            loader = torch.utils.data.DataLoader(range(len(SAMPLES)), batch_size=BATCH, sampler=sampler)
            for i, batch in enumerate(loader):
                optimizer.zero_grad()
                passes.append(1)
                loss = model(SAMPLES[batch]).pow(2).mean()
                disturb(state, len(passes))
                loss.backward()
                optimizer.step()
                sampler.record_batch(i, BATCH)
                state.seen.append((state.epoch, batch.tolist()))
                if i % 2 == 1:
                    state.commit()
            state.schedule.step()
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()
        weights = [value.clone() for value in state.model.state_dict().values()]
        return weights, optimizer.param_groups[0]["lr"], state.seen, begun

    return train(
        hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, schedule=schedule, epoch=0, seen=[])
    )


def assert_equal_training(found, expected):
    for mine, others in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine[0], others[0], strict=True))
        assert mine[1] == others[1]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("at", [2, 5, 12])
def test_a_failure_amid_training_changes_nothing_in_the_end(ranks, size, at):
    undisturbed = ranks(size, training)

    def disturb(state, passes):
        if passes == at:
            raise hvd.HorovodInternalError("all ranks see it")

    disturbed = ranks(size, lambda rank: training(rank, disturb=disturb))
    assert_equal_training(disturbed, undisturbed)
    assert all(torch.equal(a, b) for a, b in zip(disturbed[0][0], disturbed[-1][0], strict=True))


def test_a_failure_in_the_middle_of_backward_changes_nothing_in_the_end(ranks):
    undisturbed = ranks(2, training)

    def disturb(state, passes):
        if passes == 4:
            hook = state.model[0].bias.register_hook(failing)
            state.hooks = [hook]

    def failing(grad):
        raise hvd.HorovodInternalError("amid backward")

    def disturbed(rank):
        def once(state, passes):
            if passes == 5:
                state.hooks[0].remove()
            disturb(state, passes)

        return training(rank, disturb=once)

    assert_equal_training(ranks(2, disturbed), undisturbed)


@pytest.mark.parametrize(("before", "after"), [(2, 2), (3, 3), (2, 4), (4, 3), (3, 1)])
def test_a_new_start_goes_on_where_the_last_one_was_committed(ranks, folder, before, after):
    def stop(state, passes):
        if passes == 6:  # in the second epoch with 3 ranks and more
            raise Stop

    with pytest.raises(Stop):
        ranks(before, lambda rank: training(rank, disturb=stop))
    results = ranks(after, training)
    if before == after:
        assert_equal_training(results, ranks_without(folder, ranks, before))
    assert all(torch.equal(a, b) for r in results for a, b in zip(r[0], results[0][0], strict=True))
    assert len({result[1] for result in results}) == 1


def ranks_without(folder, ranks, size):
    for entry in folder.iterdir():
        entry.unlink()
    return ranks(size, training)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 2), (3, 4), (1, 4)])
def test_no_sample_is_lost_or_repeated_over_a_change_of_size(ranks, folder, before, after):
    """Beyond the documented padding: each rank gets equally many, by repeating the first ones."""

    def epoch(rank, stop):
        hvd.init()
        sampler = hvd.elastic.ElasticSampler(range(37), seed=5)
        done = []

        @hvd.elastic.run
        def train(state):
            for i, sample in enumerate(sampler):
                hvdlite.barrier()
                done.append(sample)
                sampler.record_batch(i, 1)
                state.commit()
                if i == stop:
                    raise Stop
            return done

        try:
            return train(hvd.elastic.TorchState(sampler=sampler))
        except Stop:
            return done

    first = [sample for done in ranks(before, lambda rank: epoch(rank, 4)) for sample in done]
    second = [sample for done in ranks(after, lambda rank: epoch(rank, None)) for sample in done]
    assert len(first) == 5 * before == len(set(first))
    assert sorted({*first, *second}) == list(range(37))
    assert not set(first) & set(second)
    assert len(second) - len(set(second)) == -(37 - len(first)) % after


def test_values_are_read_set_and_saved(ranks):
    def body(rank):
        model, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        state = hvd.elastic.TorchState(model=model, batch=1)
        assert state.model is model
        assert state.optimizer is None
        state.model = other
        with torch.no_grad():
            other.weight.add_(1)
        state.batch = 5
        state.restore()
        assert state.model is other
        assert torch.equal(other.weight, state._handlers["model"].saved["weight"])
        with pytest.raises(AttributeError, match="TorchState has no attribute 'epoch'"):
            _ = state.epoch
        return state.batch

    assert ranks(1, body) == [1]


def test_who_joined_late_restores_what_it_was_given(ranks):
    """Before its first commit, too: what sync() brings is saved."""

    def body(rank):
        model = torch.nn.Linear(1, 1)
        with torch.no_grad():
            model.weight.fill_(rank)
        state = hvd.elastic.TorchState(model=model)
        state.sync()
        with torch.no_grad():
            model.weight.fill_(9)
        state.restore()
        return model.weight.item()

    assert ranks(2, body) == [0.0, 0.0]


def test_the_registry_says_how_a_class_is_remembered(ranks):
    class Counter:
        def __init__(self):
            self.n = 0

    class CounterHandler(states.StateHandler):
        def __init__(self, value):
            super().__init__(value)
            self.save()

        def save(self):
            self.saved = self.value.n

        def restore(self):
            self.value.n = self.saved

        def sync(self):
            self.value.n = hvd.broadcast_object(self.value.n)
            self.save()

    before = states.get_handler_registry()

    def body(rank):
        counter = Counter()
        counter.n = rank
        state = hvd.elastic.TorchState(counter=counter)
        state.sync()
        counter.n += 5
        state.restore()
        return counter.n, state.counter is counter

    try:
        states.set_handler_registry([(Counter, CounterHandler), *before])
        assert ranks(2, body) == [(0, True)] * 2
    finally:
        states.set_handler_registry(before)


@pytest.mark.parametrize("name", ["save", "commit", "sync"])
def test_a_model_by_the_name_of_a_method_is_refused(name):
    with pytest.raises(hvd.InvalidRequestError, match=rf"TorchState\({name}=\.\.\.\): '{name}' is a method"):
        hvd.elastic.TorchState(**{name: torch.nn.Linear(1, 1)})
