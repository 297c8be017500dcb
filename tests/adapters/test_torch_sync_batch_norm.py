"""SyncBatchNorm on the ranks' batches against torch's batch normalization on all of them in one process."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

import hvdlite.torch as hvd

FEATURES = 3


def batch_of(rank, shape=(), dtype=torch.float64, rows=None):
    """Batch of a rank: lengths differ, and that of rank 1 is empty unless `rows` says otherwise."""
    generator = torch.Generator().manual_seed(rank)
    n = (3, 0, 2, 1)[rank] if rows is None else rows
    return (torch.randn(n, FEATURES, *shape, generator=generator, dtype=torch.float64) + 3 * rank).to(dtype)


def with_parameters(layer):
    """Give a layer weights that are neither equal nor 1."""
    if layer.affine:
        layer.weight.data.copy_(torch.tensor([0.5, 2.0, -1.0]))
        layer.bias.data.copy_(torch.tensor([1.0, -3.0, 0.25]))
    return layer


def train(layer, batches, steps=1):
    """Return outputs and input gradients of the last of `steps`. Losses weight every element differently."""
    for _ in range(steps):
        layer.zero_grad()
        inputs = [batch.clone().requires_grad_() for batch in batches]
        output = layer(torch.cat(inputs))
        weights = torch.cat([torch.sin(batch + 1.0) for batch in batches])
        (output * weights).sum().backward()
    return output.detach(), [x.grad for x in inputs]


def parameters_of(layer):
    return [layer.weight.grad, layer.bias.grad] if layer.affine else []


def running_of(layer):
    return [b for b in (layer.running_mean, layer.running_var, layer.num_batches_tracked) if b is not None]


def assert_alike(actual, expected, tolerance=1e-9):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


OPTIONS = [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1, "momentum": 0.7}]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 2)])
def test_ranks_train_as_one_process_with_all_batches(ranks, size, shape):
    compare(ranks, size, shape, {})


@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_does_what_it_does_in_one_process(ranks, options):
    compare(ranks, 3, (2,), options)


def compare(ranks, size, shape, options):
    batches = [batch_of(rank, shape) for rank in range(size)]
    plain = with_parameters(torch.nn.BatchNorm1d(FEATURES, **options)).double()
    plain._check_input_dim = lambda _: None  # any number of dimensions
    outputs, gradients = train(plain, batches, steps=2)
    expected_outputs = outputs.split([len(batch) for batch in batches])

    def body(rank):
        layer = with_parameters(hvd.SyncBatchNorm(FEATURES, **options)).double()
        output, (gradient,) = train(layer, [batches[rank]], steps=2)
        assert_alike([output, gradient], [expected_outputs[rank], gradients[rank]])
        averages = [hvd.allreduce(g) for g in parameters_of(layer)]
        assert_alike(averages, [g / size for g in parameters_of(plain)])
        assert_alike(running_of(layer), running_of(plain))
        layer.eval()
        plain_eval = copy.deepcopy(plain).eval()
        assert_alike([layer(batches[0])], [plain_eval(batches[0])])
        return running_of(layer)

    first, *others = ranks(size, body)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_accumulated_in_float32(ranks, dtype):
    # 4000 values of about 60 add up to more than float16 holds, and than bfloat16 counts.
    batches = [(batch_of(rank, (1000,), rows=2) * 0.25 + 60).to(dtype) for rank in range(2)]
    plain = torch.nn.BatchNorm1d(FEATURES)
    outputs, gradients = train(plain, [batch.float() for batch in batches])

    def body(rank):
        layer = hvd.SyncBatchNorm(FEATURES)
        output, (gradient,) = train(layer, [batches[rank]])
        assert output.dtype == gradient.dtype == dtype
        assert_alike([output.float()], [outputs[2 * rank : 2 * rank + 2]], 2e-2)
        assert_alike([gradient.float()], [gradients[rank]], 5e-2)
        assert_alike(running_of(layer), running_of(plain), 1e-5)

    ranks(2, body)


def test_a_large_mean_does_not_drown_the_variance(ranks):
    # In float32 the mean of the squares minus the square of the mean would be noise: near 1e10 numbers are 1024 apart.
    batches = [torch.randn(50, FEATURES, generator=torch.Generator().manual_seed(r)) + 1e5 for r in range(3)]
    expected = torch.cat(batches).double().var(0)

    def body(rank):
        layer = hvd.SyncBatchNorm(FEATURES, momentum=1.0)
        layer(batches[rank])
        torch.testing.assert_close(layer.running_var.double(), expected, rtol=1e-5, atol=0)

    ranks(3, body)


def test_channels_last_gives_the_same_numbers_and_stays(ranks):
    def body(rank):
        batch = batch_of(rank, (2, 3), rows=2)
        expected = hvd.SyncBatchNorm(FEATURES).double()(batch)
        output = hvd.SyncBatchNorm(FEATURES).double()(batch.to(memory_format=torch.channels_last))
        assert output.is_contiguous(memory_format=torch.channels_last)
        assert_alike([output], [expected], 1e-12)

    ranks(2, body)


def test_a_first_layer_whose_input_needs_no_gradient_on_some_ranks_does_not_hang(ranks):
    def body(rank):
        layer = hvd.SyncBatchNorm(FEATURES).double()
        x = batch_of(0).requires_grad_(rank == 0)
        (layer(x) ** 2).sum().backward()
        assert (x.grad is None) == (rank != 0)

    ranks(3, body)


def test_layers_do_not_meet_and_steps_repeat(ranks):
    norms = [torch.nn.BatchNorm1d(FEATURES) for _ in range(3)]
    middle = [torch.nn.Linear(FEATURES, FEATURES), norms[1], torch.nn.Tanh()]
    plain = torch.nn.Sequential(norms[0], *middle, norms[2], torch.nn.Linear(FEATURES, 1)).double()
    copies = [copy.deepcopy(plain) for _ in range(3)]
    batches = [batch_of(rank, rows=4 + rank) for rank in range(3)]
    _, gradients = train(plain, batches, steps=3)

    def body(rank):
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(copies[rank])
        _, (gradient,) = train(model, [batches[rank]], steps=3)
        assert_alike([gradient], [gradients[rank]])
        for mine, all_together in zip(model.parameters(), plain.parameters(), strict=True):
            assert_alike([hvd.allreduce(mine.grad)], [all_together.grad / 3])

    ranks(3, body)


def test_a_layer_used_twice_and_its_copy_work(ranks):
    batches = [batch_of(rank, rows=3) for rank in range(2)]
    plain = torch.nn.BatchNorm1d(FEATURES).double()

    def use(layer, batch):
        (layer(layer(batch)) ** 3).sum().backward()
        twin = copy.deepcopy(layer)
        (layer(batch) * twin(batch)).sum().backward()
        return [*running_of(layer), *running_of(twin), layer.weight.grad, twin.weight.grad]

    expected = use(plain, torch.cat(batches))

    def body(rank):
        *running, of_layer, of_twin = use(hvd.SyncBatchNorm(FEATURES).double(), batches[rank])
        assert_alike([*running, hvd.allreduce(of_layer) * 2, hvd.allreduce(of_twin) * 2], expected)

    ranks(2, body)


def test_evaluation_talks_to_nobody(ranks):
    def body(rank):
        layer = hvd.SyncBatchNorm(FEATURES, track_running_stats=rank == 1).eval().double()
        if rank == 1:  # alone
            layer(batch_of(0))

    ranks(2, body)


def test_a_process_set_is_one_batch(ranks):
    batches = [batch_of(rank, rows=2) for rank in range(3)]
    expected = torch.nn.BatchNorm1d(FEATURES).double()
    expected(torch.cat([batches[0], batches[2]]))

    def body(rank):
        layer = hvd.SyncBatchNorm(FEATURES, process_set=hvd.add_process_set([0, 2])).double()
        if rank == 1:
            with pytest.raises(hvd.NotMemberError):
                layer(batches[rank])
        else:
            layer(batches[rank])
            assert_alike(running_of(layer), running_of(expected))

    ranks(3, body)


def wrong_inputs():
    return [
        (torch.ones(3), "got float32[3]"),
        (torch.ones(2, 4), "expected a floating-point tensor (batch, 3, …), got float32[2, 4]"),
        (torch.ones(2, 3, dtype=torch.int64), "got int64[2, 3]"),
        (torch.ones(2, 3, device="meta"), "on device 'meta'"),
    ]


@pytest.mark.parametrize("case", range(4))
def test_a_wrong_input_on_one_rank_raises_on_all_and_the_next_call_works(ranks, case):
    wrong, message = wrong_inputs()[case]

    def body(rank):
        layer = hvd.SyncBatchNorm(FEATURES)
        with pytest.raises(hvd.InvalidRequestError if rank == 1 else hvd.RemoteError) as caught:
            layer(wrong if rank == 1 else torch.ones(2, FEATURES))
        assert message in str(caught.value)
        layer(batch_of(rank, dtype=torch.float32))
        assert int(layer.num_batches_tracked) == 1

    ranks(3, body)


@pytest.mark.parametrize("last_has", [0, 1])
def test_too_few_values_on_all_ranks_together_raise_on_all(ranks, last_has):
    def body(rank):
        layer = hvd.SyncBatchNorm(FEATURES)
        with pytest.raises(ValueError, match=f"{last_has} values per feature on all ranks together"):
            layer(torch.ones(last_has if rank == 2 else 0, FEATURES))

    ranks(3, body)


def test_layers_of_different_widths_are_named_on_all_ranks(ranks):
    def body(rank):
        with pytest.raises(hvd.MismatchError, match="'sync_batch_norm.noname.1.moments'"):
            hvd.SyncBatchNorm(2 + rank)(torch.ones(2, 2 + rank))

    ranks(2, body)


def by_pickle(layer):
    return pickle.loads(pickle.dumps(layer))


def by_torch(layer):
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("kept", [lambda layer: layer, copy.deepcopy, by_pickle, by_torch])
def test_a_layer_from_before_shutdown_meets_new_ones_of_the_other_ranks(ranks, kept):
    batches = [batch_of(rank, rows=2 + rank) for rank in range(2)]

    def body(rank):
        layers = [hvd.SyncBatchNorm(FEATURES).double() for _ in range(2)]
        for layer in layers:
            layer(batches[rank])
        hvd.shutdown()
        hvd.init()
        layer = kept(layers[1]) if rank == 0 else hvd.SyncBatchNorm(FEATURES).double()
        layer.reset_running_stats()
        layer(batches[rank])
        return running_of(layer)

    expected = torch.nn.BatchNorm1d(FEATURES).double()
    expected(torch.cat(batches))
    for running in ranks(2, body, timeout=10):
        assert_alike(running, running_of(expected))


def test_what_is_no_process_set_is_refused_at_once():
    for wrong in (None, [0, 1]):
        with pytest.raises(hvd.InvalidRequestError, match="expected a ProcessSet"):
            hvd.SyncBatchNorm.convert_sync_batchnorm(torch.nn.BatchNorm1d(2), wrong)


def test_a_layer_may_be_made_before_init():
    assert hvd.SyncBatchNorm(2, 1e-3, 0.2, False, False).eps == 1e-3
    with pytest.raises(hvd.NotInitializedError):
        hvd.SyncBatchNorm(2)(torch.ones(2, 2))


def test_conversion_replaces_every_layer_and_keeps_tensors():
    shared = torch.nn.BatchNorm1d(2, momentum=None)
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm2d(2, affine=False, eps=0.5), shared)
    model = torch.nn.Sequential(inner, shared, torch.nn.SyncBatchNorm(2, track_running_stats=False), torch.nn.ReLU())
    model[0][1].eval()
    state = model.state_dict(keep_vars=True)

    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model)

    assert converted is model
    layers = [model[0][1], model[0][2], model[1], model[2]]
    assert all(type(layer) is hvd.SyncBatchNorm for layer in layers)
    assert [layer.training for layer in layers] == [False, True, True, True]
    assert (layers[0].eps, layers[0].affine, layers[1].momentum, layers[3].track_running_stats) == (
        0.5, False, None, False,
    )  # fmt: skip
    after = model.state_dict(keep_vars=True)
    assert after.keys() == state.keys()
    assert all(after[name] is state[name] for name in state)
    assert isinstance(model[3], torch.nn.ReLU)
    assert hvd.SyncBatchNorm.convert_sync_batchnorm(model)[1] is layers[2]  # nothing left to do


def test_a_converted_model_trains_as_one_process(ranks):
    batches = [batch_of(rank, (2, 2)) for rank in range(3)]
    plain = with_parameters(torch.nn.BatchNorm2d(FEATURES)).double()
    _, gradients = train(plain, batches)

    def body(rank):
        mine = hvd.SyncBatchNorm.convert_sync_batchnorm(with_parameters(torch.nn.BatchNorm2d(FEATURES)).double())
        _, (gradient,) = train(mine, [batches[rank]])
        assert_alike([gradient], [gradients[rank]])

    ranks(3, body)
