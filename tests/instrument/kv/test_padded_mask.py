"""Masks are read once per pass, on every device, and never outlive the pass."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch

from headscan.kv.padded_masks import MaskReader


def padded() -> torch.Tensor:
    mask = torch.ones(6, 6, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    mask[1, ..., :3] = False
    return mask


def test_a_mask_dies_with_the_pass() -> None:
    reader, mask = MaskReader(), padded()
    first = reader.read(mask, place=True)
    assert reader.read(mask, place=True) is first and first.real_BS is not None
    assert first.real_BS.sum(1).tolist() == [6, 3]
    gone = ref(mask)
    del mask, first
    gc.collect()
    assert gone() is None and reader._placed is None


@pytest.mark.parametrize("same", [True, False])
def test_copies_on_other_devices_are_not_read_again(same: bool) -> None:
    reader, mask = MaskReader(same=same), padded()
    reader.read(mask, place=True)
    copy = mask.to("meta")  # reading its numbers fails
    if not same:
        with pytest.raises(RuntimeError):
            reader.read(copy, place=True)
        return
    found = reader.read(copy, place=True)
    assert found.gaps == 0 and found.seen_BNS.device.type == found.real_BS.device.type == "meta"
    assert reader.read(mask, place=True).seen_BNS.device.type == "cpu"
