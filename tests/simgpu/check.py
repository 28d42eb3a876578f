"""What the simulated GPU promises, each as one small check.

tests/simgpu/run python tests/simgpu/check.py        # ends with "N passed, 0 failed"
tests/simgpu/run python tests/simgpu/check.py nccl   # checks with this word in the name
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

HERE = str(Path(__file__).resolve().parent)


def error_of(function: Callable[[], object]) -> str:
    """The message of the error that a call must raise."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def in_process(code: str, processes: int = 1, **environment: str) -> str:
    """What Python processes print. Each of several runs with its RANK."""
    started = []
    for rank in range(processes):
        env = os.environ | {"SIMGPU_TRACE": "1", "SIMGPU_COUNT": str(processes)}
        env |= {"RANK": str(rank), "WORLD_SIZE": str(processes)} | environment
        command = [sys.executable, "-c", f"import os, torch\n{code}"]
        started.append(
            subprocess.Popen(command, env=env, stdout=-1, stderr=-2, text=True)
        )
    return "".join(process.communicate(timeout=120)[0] for process in started)


def check_host_cannot_read_device_memory() -> None:
    tensor = torch.ones(4, device="cuda")
    child = os.fork()
    if not child:
        ctypes.string_at(tensor.data_ptr(), 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] != 0  # a segmentation fault
    assert torch.equal(tensor.cpu(), torch.ones(4))


def check_training_gives_the_numbers_of_the_cpu() -> None:
    images, labels = torch.randn(8, 3, 16, 16), torch.randint(10, (8,))
    for name in ("SGD", "RMSprop", "NAdam", "Rprop", "Adafactor", "Adam", "Adagrad"):
        results = []
        for device in ("cpu", "cuda"):
            torch.manual_seed(0)
            layers = [
                nn.Conv2d(3, 8, 3, bias=False),
                nn.BatchNorm2d(8),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
            net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(8 * 49, 10)).to(device)
            optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.01)
            for _ in range(3):
                outputs = net(images.to(device))
                optimizer.zero_grad()
                functional.cross_entropy(outputs, labels.to(device)).backward()
                optimizer.step()
            results.append(nn.utils.parameters_to_vector(net.parameters()).cpu())
        assert torch.allclose(*results, atol=1e-5), name


def check_a_tensor_left_on_the_cpu() -> None:
    on_gpu, on_cpu = torch.ones(2, 2, device="cuda"), torch.ones(2, 2)
    expected = (
        "Expected all tensors to be on the same device, but found at least two devices"
    )
    for function in (lambda: on_gpu + on_cpu, lambda: on_cpu @ on_gpu):
        assert expected in error_of(function)
    assert "cuda:0 and cpu" in error_of(lambda: torch.tensor(0.0).add_(on_gpu.sum()))
    assert torch.equal((on_gpu * torch.tensor(3.0)).cpu(), on_cpu * 3)  # a number may


def check_float16_products_are_summed_in_float32() -> None:
    ones = torch.ones(1, 4096, dtype=torch.float16)
    small = torch.full((4096, 1), 0.0004, dtype=torch.float16)
    exact = (ones.double() @ small.double()).half()
    assert torch.equal((ones.cuda() @ small.cuda()).cpu(), exact)
    assert (ones.cuda() @ small.cuda()).dtype == torch.float16
    assert "dtype" in error_of(lambda: ones.cuda() @ small.float().cuda())


def check_autocast_and_scaler() -> None:
    weight = torch.ones(4, 4, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", torch.float16):
        product = weight @ weight
    assert product.dtype == torch.float16
    scaler.scale((product.float() * 1e4).sum()).backward()  # too large for float16
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 32768
    assert (weight == 1).all()


def check_generator_state() -> None:
    before, state = torch.get_rng_state(), torch.cuda.get_rng_state()
    first = torch.rand(64, device="cuda")
    second = torch.rand(64, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(first, torch.rand(64, device="cuda"))
    assert not torch.equal(first, second)
    assert torch.equal(before, torch.get_rng_state())  # the CPU's generator stays


def check_pinned_copies() -> None:
    pinned = torch.arange(5.0).pin_memory()
    assert pinned.is_pinned()
    assert not torch.arange(5.0).is_pinned()
    assert torch.equal(pinned.to("cuda", non_blocking=True).cpu(), torch.arange(5.0))
    assert "pin" in error_of(lambda: torch.ones(2, device="cuda").pin_memory())


def check_copies_and_views() -> None:
    matrix = torch.arange(12.0).view(3, 4)
    assert torch.equal(matrix.t().cuda().cpu(), matrix.t())
    assert torch.equal(matrix.cuda()[:, ::2].half().cpu(), matrix[:, ::2].half())
    view = matrix.cuda()
    view[1].fill_(0)
    view.diagonal().add_(5)
    assert view.sum().item() == 59


def check_streams_and_events() -> None:
    stream, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    event.record()
    with torch.cuda.stream(stream):
        end = torch.cuda.Event(enable_timing=True)
        end.record()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    assert end.query()
    assert event.elapsed_time(end) > 0


def check_sync_debug_mode() -> None:
    tensor = torch.randn(5, 5, device="cuda")
    pinned = torch.ones(5).pin_memory()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for wait in (
            tensor.sum().item,
            tensor.nonzero,
            tensor.cpu,
            lambda: tensor[tensor > 0],
            lambda: torch.ones(5).to("cuda"),
        ):
            assert "synchronizing" in error_of(wait)
        (tensor @ tensor).relu_().sum()
        pinned.to("cuda", non_blocking=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


COLLECTIVES = """
import torch.distributed as dist
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method=os.environ["STORE"], rank=rank, world_size=size)
x = torch.full((3_000_000,), rank + 1.0, device="cuda")
dist.all_reduce(x)
gathered = [torch.zeros(1, device="cuda") for _ in range(size)]
dist.all_gather(gathered, torch.full((1,), float(rank), device="cuda"))
part = torch.zeros(2, device="cuda")
dist.reduce_scatter_tensor(part, torch.arange(2.0 * size, device="cuda"), dist.ReduceOp.AVG)
y = torch.full((2,), float(rank), device="cuda", dtype=torch.bfloat16)
dist.broadcast(y, 1)
print(dist.get_backend(), x[0].item(), x[-1].item(), [t.item() for t in gathered], end=" ")
print(part.tolist(), y.tolist(), flush=True)
if os.environ.get("LEAVE") == str(rank): os._exit(1)
dist.all_reduce(x)
torch.cuda.synchronize()
dist.destroy_process_group()
"""


def collectives(**environment: str) -> str:
    """What two ranks print, of which the process LEAVE ends early."""
    with tempfile.TemporaryDirectory() as folder:
        return in_process(COLLECTIVES, 2, STORE=f"file://{folder}/store", **environment)


def check_nccl_between_processes() -> None:
    printed = collectives()
    assert "nccl 3.0 3.0 [0.0, 1.0] [0.0, 1.0] [1.0, 1.0]" in printed, printed
    assert " [2.0, 3.0] [1.0, 1.0]" in printed, printed


def check_nccl_rank_that_ends() -> None:
    assert "remote process exited" in collectives(LEAVE="1")


# What a process prints: its code, its environment, and what must be in it.
TWO_DEVICES = """
a, b = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
print(torch.cuda.device_count(), (a.to("cuda:1") + b).tolist(), (a + b.to("cuda:0")).device)
net = torch.nn.DataParallel(torch.nn.Linear(2, 1).cuda())
print(net(torch.ones(4, 2, device="cuda")).shape, torch.cuda._device_count_nvml())
try: torch.empty(2**28, device="cuda:1")
except torch.OutOfMemoryError as error: print(error)
a + b"""
COUNTERS = """
import simgpu
x = torch.ones(4, 4, device="cuda")
simgpu.reset_counts()
(x @ x).sum().item()
print([f"{name} {number}" for name, number in simgpu.counts().items()])"""
ADD = (
    "for i in range(9): print(i, torch.ones(2, device='cuda').sum().item(), flush=True)"
)
GRAPH = "with torch.cuda.graph(torch.cuda.CUDAGraph()): pass"
UUID = "print(torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid)"
UPSAMPLED = """
image = torch.ones(1, 1, 4, 4, device="cuda", requires_grad=True)
larger = torch.nn.functional.interpolate(image, scale_factor=2, mode="bilinear").sum()
torch.use_deterministic_algorithms(True)
larger.backward()"""
PROCESSES = {
    "memory": (
        "torch.empty(2**36, device='cuda')",
        {},
        ("of memory. Tried to allocate 256.00",),
    ),
    "deterministic": (UPSAMPLED, {}, ("not have a deterministic implementation",)),
    "two devices": (
        TWO_DEVICES,
        {"SIMGPU_COUNT": "2", "SIMGPU_MIB": "2048,64"},
        (
            "2 [2.0, 2.0] cuda:0",
            "torch.Size([4, 1]) 2",
            "at least two devices, cuda:0 and cuda:1!",
            "GPU 1 has a total capacity of 64.00 MiB",
        ),
    ),
    "counters": (
        COUNTERS,
        {},
        ("operation aten::mm 1", "wait cudaStreamSynchronize 1"),
    ),
    "kernel": (
        ADD,
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        ("simgpu: the kernel void at::",),
    ),
    "graph": (GRAPH, {}, ("cudaStreamBeginCapture is not simulated",)),
    "visible devices": (
        UUID,
        {"SIMGPU_COUNT": "3", "CUDA_VISIBLE_DEVICES": "2"},
        ("1 07", "02"),
    ),
    "no visible device": (
        UUID,
        {"CUDA_VISIBLE_DEVICES": ""},
        ("No CUDA GPUs are available",),
    ),
    "device that fails": (
        ADD,
        {"SIMGPU_FAIL_AT": "6"},
        ("1 2.0", "unspecified launch failure"),
    ),
    "old driver": (
        ADD,
        {"SIMGPU_DRIVER": "12040"},
        ("driver on your system is too old",),
    ),
    "old device": (ADD, {"SIMGPU_CAPABILITY": "70"}, ("no kernel image is available",)),
}


def check_process(name: str) -> None:
    code, environment, parts = PROCESSES[name]
    printed = in_process(code, **environment)
    for part in parts:
        assert part in printed, f"no {part!r} in {printed}"


def main() -> int:
    warnings.simplefilter("ignore")
    word = "".join(sys.argv[1:])
    checks = {name: partial(check_process, name) for name in PROCESSES}
    checks |= {name: x for name, x in globals().items() if name.startswith("check_")}
    del checks["check_process"]
    chosen = [name for name in checks if word in name]
    failed = 0
    for name in chosen:
        try:
            checks[name]()
        except Exception:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
    print(f"{len(chosen) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
