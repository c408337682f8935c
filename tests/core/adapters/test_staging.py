"""Staged copies are exact across block borders; on CUDA the blocks are page-locked and the copies overlap."""

import numpy as np
import pytest
import torch

from gradientmail_core.adapters.staging import Staging

DEVICES = [
    torch.device("cpu"),
    pytest.param(torch.device("cuda", 0), marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")),
]


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("sizes", [(0, 1), (8,), (7, 9, 1), (64, 3, 100), (5,) * 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_downloads_arrive_whole(device, sizes, dtype):
    staging = Staging(device, elements=8)
    sources = [torch.arange(size, device=device).to(dtype) for size in sizes]
    outs = [np.full(size, np.nan, np.float32) for size in sizes]
    for _ in range(2):
        for source, out in zip(sources, outs, strict=True):
            staging.download(source, out)
        staging.settle()
        for source, out in zip(sources, outs, strict=True):
            assert np.array_equal(out, source.float().cpu().numpy())
            out.fill(np.nan)


@pytest.mark.parametrize("device", DEVICES, ids=str)
@pytest.mark.parametrize("size", [0, 1, 8, 100])
def test_uploads_arrive_whole(device, size):
    staging = Staging(device, elements=8)
    first, second = (np.arange(size, dtype=np.float32) + shift for shift in (0, 1000))
    uploads = [staging.upload(values) for values in (first, second)]
    assert np.array_equal(torch.cat(uploads).cpu().numpy(), np.concatenate([first, second]))


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_uploads_and_downloads_may_alternate(device):
    staging = Staging(device, elements=8)
    out = np.empty(5, np.float32)
    staging.download(torch.arange(5.0, device=device), out)
    upload = staging.upload(np.full(20, 3, np.float32))
    staging.settle()
    assert np.array_equal(out, np.arange(5, dtype=np.float32))
    assert torch.equal(upload.cpu(), torch.full((20,), 3.0))
