"""A model in context_parallel: trained in parts it is the model that one process trains."""

import contextlib
import dataclasses
import os
import re

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'cupy-flash[torch]'")

import torch.distributed as dist
from torch import nn
from torch.nn import functional

import cupy_flash.torch as cf
from cupy_flash import InvalidArgumentsError, UnsupportedError
from cupy_flash.parallel import positions
from tests.paths import ROOT
from tests.torch.processes import in_processes

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")]

WIDTH, HEADS, WORDS = 32, 4, 11


class Model(nn.Module):
    """A transformer of one layer, whose rotary table is a buffer."""

    def __init__(self, seqlen):
        super().__init__()
        self.words, self.out = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        angle = torch.arange(seqlen)[:, None] * torch.logspace(0, -3, WIDTH // HEADS // 2)
        self.register_buffer("turns", torch.polar(torch.ones_like(angle), angle).to(torch.complex128))

    def turned(self, x):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * self.turns).flatten(-2)

    def forward(self, tokens):
        x = self.words(tokens)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        o = functional.scaled_dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return self.out(x + self.o(o.transpose(1, 2).flatten(2)))


def trained(steps, seqlen, mesh=None, schedule=None):
    """Losses, the last logits and the parameters after some steps."""
    torch.manual_seed(0)
    model = Model(seqlen).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(WORDS, (2, seqlen + 1))
        inputs, labels = tokens[:, :-1].clone(), tokens[:, 1:].clone()

        def step(inputs=inputs, labels=labels):
            logits = model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            loss = loss / (2 * seqlen)
            optimizer.zero_grad()
            loss.backward()
            return logits, loss.detach()

        if mesh is None:
            logits, loss = step()
        else:
            cut = {"buffers": [inputs, labels, model.turns], "buffer_seq_dims": [1, 1, 0]}
            with cf.context_parallel(mesh, **cut, schedule=schedule):
                assert inputs.shape[1] == model.turns.shape[0] <= seqlen // mesh.size() + 2
                logits, loss = step()
            assert torch.equal(inputs, tokens[:, :-1])
            (logits,) = cf.context_parallel_unshard(mesh, [logits], [1])
            for x in (loss, *(parameter.grad for parameter in model.parameters())):
                dist.all_reduce(x)
        optimizer.step()
        losses.append(loss)
    return torch.stack(losses), logits.detach(), [x.detach() for x in model.parameters()]


def process(rank, ranks):
    """The same training by each schedule, and what is refused."""
    mesh = dist.init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    own = functional.scaled_dot_product_attention
    for seqlen, steps in ((32, 20), (27, 4)):
        wanted = trained(steps, seqlen)
        assert wanted[0][-1] != wanted[0][0]
        for schedule in (None, "ring", "alltoall", "allgather"):
            for ours, theirs in zip(trained(steps, seqlen, mesh, schedule), wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)
            assert functional.scaled_dot_product_attention is own
    check_sharded()
    check_decode(rank, ranks)
    check_buffers(mesh)
    check_strides(mesh)
    check_layers(mesh)
    check_refusals(mesh, own)
    check_mistakes_of_one(mesh, rank)


def code_of(name):
    """What the page defines in the block that has a function."""
    page = (ROOT / "docs" / "parallel.md").read_text(encoding="utf-8")
    (block,) = (x for x in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if f"def {name}(" in x)
    defined = {}
    exec(block, defined)
    return defined


def check_sharded():
    """Weights sharded over all processes, sequences over two of them, as the page has it."""
    sharded, step = code_of("sharded")["sharded"], code_of("sharded_step")["sharded_step"]
    model, alone = (Model(16).double() for _ in range(2))
    batches = train_alone(alone, model)
    cp, share = sharded(model, 2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for tokens in batches:
        own = tokens[2 * share : 2 * share + 2]
        step(model, optimizer, own[:, :-1].clone(), own[:, 1:].clone(), cp)
    check_parameters(model, alone)


def train_alone(alone, model, make_optimizer=torch.optim.AdamW, lr=0.01):
    """Give a model the weights of another, train it in this process, and return the tokens."""
    batches = torch.randint(WORDS, (3, 4, 17), generator=torch.Generator().manual_seed(1))
    alone.load_state_dict(model.state_dict())
    optimizer = make_optimizer(alone.parameters(), lr=lr)
    for tokens in batches:
        result = alone(tokens[:, :-1])
        logits = getattr(result, "logits", result)  # those of transformers
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for x, first in zip(alone.parameters(), model.parameters(), strict=True):
        assert (x - first).abs().max() > 1e-3
    return batches


def check_parameters(model, alone, tolerance=1e-9):
    for x, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(x.full_tensor(), wanted, rtol=0, atol=tolerance)


def check_decode(rank, ranks):
    """Keys dealt out one by one; with two keys some processes hold none."""
    decode = code_of("decode")["decode"]
    generator = torch.Generator().manual_seed(0)
    for length in (2, 3, 21):
        q, k, v = (
            torch.randn(2, heads, rows, 8, generator=generator, dtype=torch.float64)
            for heads, rows in ((4, 1), (2, length), (2, length))
        )
        own = [torch.zeros(2, 2, 8, 8, dtype=torch.float64) for _ in "kv"]
        held = len(range(rank, length, ranks))
        for cache, x in zip(own, (k, v), strict=True):
            cache[:, :, :held] = x[:, :, rank::ranks]
        wanted = functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        torch.testing.assert_close(decode(q, *own, held), wanted, rtol=0, atol=1e-12)


def check_buffers(mesh):
    """In place, back at the end, also after an exception; not those that stay cut."""
    whole = torch.arange(16.0).reshape(1, 16, 1)
    x, y, same = whole.clone(), whole.clone(), None
    with contextlib.suppress(KeyError), cf.context_parallel(
        mesh, buffers=[x, y], buffer_seq_dims=[1, -2], no_restore_buffers={y}
    ):  # fmt: skip
        same = x.clone()
        (gathered,) = cf.context_parallel_unshard(mesh, [x], [1])
        raise KeyError
    assert torch.equal(x, whole)
    assert torch.equal(y, same)
    assert torch.equal(gathered, whole)
    # Views of the same memory are cut each by itself, and are views again.
    tokens = torch.arange(34).reshape(2, 17)
    kept, views = tokens.clone(), [tokens[:, :-1], tokens[:, 1:]]
    mine = torch.from_numpy(positions(mesh.get_local_rank(), mesh.size(), 16, causal=True))
    with cf.context_parallel(mesh, buffers=views, buffer_seq_dims=[1, 1]):
        for shift, x in enumerate(views):
            assert torch.equal(x, kept[:, shift + mine])
    assert torch.equal(tokens, kept)
    assert [x.data_ptr() for x in views] == [tokens.data_ptr() + n * tokens.itemsize for n in (0, 1)]
    # Attention that is not causal sees all keys, in whatever order.
    for seqlen in (16, 13, 3):
        q = torch.randn(1, 4, seqlen, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        wanted = functional.scaled_dot_product_attention(q, q[:, :2], q[:, :2], enable_gqa=True)
        part = q.clone()
        with cf.context_parallel(mesh, buffers=[part], buffer_seq_dims=[2]):
            o = functional.scaled_dot_product_attention(part, part[:, :2], part[:, :2], enable_gqa=True)
            with pytest.raises(InvalidArgumentsError, match=r"query has 4 heads, key 2\.\nTry: enable_gqa"):
                functional.scaled_dot_product_attention(part, part[:, :2], part[:, :2])
        torch.testing.assert_close(cf.context_parallel_unshard(mesh, [o], [2])[0], wanted)


def check_strides(mesh):
    """Results and gradients have the order of axes of their query, by each schedule."""
    x = torch.randn(2, 4, 4, 8, dtype=torch.float64)
    for schedule in ("ring", "alltoall", "allgather"):
        for q in (x, x.transpose(1, 2)):
            q = q.detach().requires_grad_()
            with cf.context_parallel(mesh, schedule=schedule):
                o = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
                assert o.stride() == q.stride()
                assert torch.autograd.grad(o.sum(), q)[0].stride() == q.stride()


def check_layers(mesh):
    """torch's own layers, which without gradients compute attention by themselves otherwise."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dtype=torch.float64).eval()
    layer = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64).eval()
    whole = torch.randn(2, 16, 16, dtype=torch.float64)

    def attend(x):
        return layer(x, x, x, need_weights=False)[0]

    for function in (encoder, attend):
        with torch.no_grad():
            wanted, x = function(whole), whole.clone()
            with cf.context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
                (o,) = cf.context_parallel_unshard(mesh, [function(x)], [1])
                with pytest.raises(UnsupportedError, match="need_weights of MultiheadAttention"):
                    layer(x, x, x)
        torch.testing.assert_close(o, wanted)
    assert torch.backends.mha.get_fastpath_enabled()
    layer(whole, whole, whole)


def check_refusals(mesh, own):
    """Before a buffer is changed."""
    x, short = torch.zeros(1, 16), torch.zeros(12)
    learned = torch.zeros(16, requires_grad=True)
    with torch.inference_mode():
        inferred = torch.zeros(16)
    refused = [
        ({"buffers": [x, inferred], "buffer_seq_dims": [1, 0]}, r"buffers\[1\] was made in inference mode"),
        (
            {"buffers": [x, x.to_sparse()], "buffer_seq_dims": [1, 0]},
            r"buffers\[1\] is of layout torch.sparse",
        ),
        (
            {"buffers": [x, short], "buffer_seq_dims": [1, 0]},
            r"12 and 16 rows, not all multiples of 8\.\nTry: buffers of one length",
        ),
        ({"buffers": [x], "buffer_seq_dims": [2]}, "no axis 2"),
        ({"buffers": [x], "buffer_seq_dims": []}, "1 buffers, and axes of 0"),
        ({"buffers": [x, learned], "buffer_seq_dims": [1, 0]}, r"buffers\[1\] requires grad"),
        ({"buffers": [x], "buffer_seq_dims": [1], "no_restore_buffers": {short}}, "not among buffers"),
        ({"buffers": [x, 3], "buffer_seq_dims": [1, 0]}, r"buffers\[1\] is an int"),
        ({"buffers": [x], "buffer_seq_dims": [1], "schedule": "star"}, "schedule is 'star'"),
    ]
    for given, words in refused:
        with pytest.raises(InvalidArgumentsError, match=words), cf.context_parallel(mesh, **given):
            pass
        assert x.shape == (1, 16)
        assert functional.scaled_dot_product_attention is own
    for wrong, words in ((mesh.get_group(), "a ProcessGroup.*, not a DeviceMesh"), (None, "mesh is None")):
        with pytest.raises(InvalidArgumentsError, match=words), cf.context_parallel(wrong):
            pass
    two = dist.init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("dp", "cp"))
    with pytest.raises(InvalidArgumentsError, match=r'2 dimensions.*\nTry: a slice of it, mesh\["cp"\]'):
        cf.context_parallel_unshard(two, [x], [1])
    with cf.context_parallel(two["cp"]):
        q = torch.zeros(1, 1, 4, 8)
        functional.scaled_dot_product_attention(q, q, q)
        for name, given in (("attn_mask", torch.ones(4, 4, dtype=torch.bool)), ("dropout_p", 0.1)):
            with pytest.raises(UnsupportedError, match=f"{name} is not supported inside of context_parallel"):
                functional.scaled_dot_product_attention(q, q, q, **{name: given})


def check_mistakes_of_one(mesh, rank):
    """All are told what one process refuses or does otherwise, and the mesh works afterwards."""
    odd = rank == 1

    @contextlib.contextmanager
    def told(error, own, others):
        with pytest.raises(error if odd else InvalidArgumentsError, match=own if odd else others):
            yield
        with cf.context_parallel(mesh):
            functional.scaled_dot_product_attention(q, q, q)

    def enter(x, seq_dim):
        with cf.context_parallel(mesh, buffers=[x], buffer_seq_dims=[seq_dim]):
            pass

    q, x = torch.zeros(1, 1, 4, 8), torch.zeros(1, 16)
    with told(InvalidArgumentsError, "no axis 2", r"process 1  buffers\[0\] has shape"):
        enter(x, 2 if odd else 1)
    different = "make different calls: "
    with told(InvalidArgumentsError, different + "rows of buffers", different + "rows of buffers"):
        enter(x[:, :8] if odd else x, 1)
    assert x.shape == (1, 16)
    mask = torch.ones(4, 4, dtype=torch.bool) if odd else None
    with cf.context_parallel(mesh), told(UnsupportedError, "attn_mask is not", "process 1  attn_mask is not"):
        functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    for wrong in (q.half(), q[:, :0], q.expand(2, 1, 4, 8), q.transpose(1, 3)):
        parts = [wrong if odd else q]
        with told(InvalidArgumentsError, different + r"buffers\[0\]", different + r"buffers\[0\]"):
            cf.context_parallel_unshard(mesh, parts, [2])
    some = dist.DeviceMesh("cpu", [0, 1])
    if rank > 1:
        outside = pytest.raises(InvalidArgumentsError, match=f"process {rank} is not in the mesh")
        with outside:
            cf.context_parallel_unshard(some, [x], [1])
        with outside, cf.context_parallel(some):
            pass


def test_a_model_trained_in_parts(tmp_path):
    in_processes(4, process, tmp_path, seconds=120)


def process_of_accelerate(rank, ranks):
    """A Llama and its tokens go through accelerate, as the page has it."""
    import accelerate
    import transformers

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ |= {name: str(x) for name, x in {**names, "OMP_NUM_THREADS": 1}.items()}
    # why: it refuses context parallelism where there are no GPUs. Tensors stay on the CPU.
    accelerate.PartialState(cpu=True).distributed_type = accelerate.DistributedType.MULTI_GPU
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    model, alone = (transformers.LlamaForCausalLM(config).double() for _ in range(2))
    batches, page = train_alone(alone, model), code_of("accelerated_step")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(batches.flatten(0, 1), batch_size=2)
    accelerator, model, optimizer, loader = page["prepared"](model, optimizer, loader, 2, 2)
    for tokens in loader:
        page["accelerated_step"](accelerator, model, optimizer, tokens)
    check_parameters(model, alone)


def test_a_model_of_accelerate(tmp_path):
    for package in ("accelerate", "transformers"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    in_processes(4, process_of_accelerate, tmp_path, seconds=120)


def process_of_torchtitan(rank, ranks):
    """A Llama that torchtitan cuts and shards, with the attention of the page."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import parallel_dims
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs, parallelize_llama

    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.rope = dataclasses.replace(layer.attention.rope, max_seq_len=16)
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    alone = config.build()
    model = code_of("in_parts")["in_parts"](config).build()
    torch.manual_seed(0)
    for one in (alone, model):
        one.init_states()
    batches = train_alone(alone, model, torch.optim.SGD, lr=1.0)
    parallelism = ParallelismConfig(context_parallel_degree=ranks, spmd_backend="partial_dtensor")
    parallel_dims.device_type = "cpu"  # it takes "cuda" where there is no GPU
    dims = parallel_dims.ParallelDims.from_config(parallelism, ranks)
    dims.build_mesh()
    parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=parallelism,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
    )
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    optimizer, cpu = torch.optim.SGD(model.parameters(), lr=1.0), torch.device("cpu")
    for tokens in batches:
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
        more = {"positions": torch.arange(16).repeat(len(tokens), 1)}
        cut = prepare_context_parallel_input(inputs, labels, more, dims.get_mesh("cp"), cpu)
        logits = model(cut[0], **cut[2]).flatten(0, 1)
        loss = functional.cross_entropy(logits, cut[1].flatten(), reduction="sum")
        optimizer.zero_grad()
        (loss / labels.numel()).backward()  # torchtitan adds gradients up
        optimizer.step()
    check_parameters(model, alone, 1e-6)


def test_a_model_of_torchtitan(tmp_path):
    for package in ("torchtitan", "triton"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install {package}")
    in_processes(2, process_of_torchtitan, tmp_path, seconds=120)
