"""What must hold strictly on trained weights: the two shipped ViTs and the two shipped Llamas, seeds 0 and 1."""

from functools import cache

import pytest
import torch
from cli_support import CHECKPOINTS

import rotation_merge as rm

torch.set_num_threads(1)


@cache
def after(name, **options):
    """Squared distances left in every space, by space name."""
    alignment = rm.align(*(CHECKPOINTS / f"{name}-{seed}" for seed in (0, 1)), **options)
    return {row.space: row.distance_after**2 for row in alignment.rows}


def attention(distances):
    return {name: value for name, value in distances.items() if "ffn" not in name and "mlp" not in name}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "llama"])
def test_every_step_of_the_ladder_pays(name):
    """none > rotation > the paper's sequence > joint scale > joint head order, in every layer."""
    ladder = [
        after(name, scaling=False),
        after(name, scaling="sequential"),
        after(name),
        after(name, heads="permutation"),
    ]
    for wider, narrower in zip(ladder[1:], ladder, strict=False):
        assert all(wider[space] <= narrower[space] * (1 + 1e-6) for space in narrower)
    totals = [sum(attention(step).values()) for step in ladder]
    assert totals == sorted(totals, reverse=True)
    assert totals[1] > totals[2] * (1 + 1e-5)  # the joint scale is strictly better than the sequence
    assert totals[2] > totals[3] * (1 + 1e-3)  # and so is the joint head order than none


@pytest.mark.parametrize("name", ["vit", "llama"])
def test_joint_head_order_against_spectral_pairing(name):
    spectral, joint = after(name, heads="spectral"), after(name, heads="permutation")
    assert all(joint[space] <= spectral[space] * (1 + 1e-6) for space in joint)
    assert sum(attention(joint).values()) < 0.95 * sum(attention(spectral).values())
