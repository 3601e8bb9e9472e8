"""The symmetry groups: one module each; elements act on one dimension, transforms on the axes of a space."""

from rotation_merge.symmetry.base import KINDS, GroupElement
from rotation_merge.symmetry.convolution import ConvolutionTransform
from rotation_merge.symmetry.direct_sum import DirectSum
from rotation_merge.symmetry.experts import ExpertTransform
from rotation_merge.symmetry.gains import Exchange
from rotation_merge.symmetry.heads import HeadTransform
from rotation_merge.symmetry.latent import LatentTransform
from rotation_merge.symmetry.mixer import MixerTransform
from rotation_merge.symmetry.monomial import Monomial
from rotation_merge.symmetry.neurons import NeuronTransform
from rotation_merge.symmetry.orthogonal import Orthogonal
from rotation_merge.symmetry.permutation import Permutation
from rotation_merge.symmetry.planar import Planar
from rotation_merge.symmetry.scaled import ScaledElement
from rotation_merge.symmetry.scaling import Scaling
from rotation_merge.symmetry.space import TRANSFORMS, SpaceTransform
from rotation_merge.symmetry.stream import StreamGroup, StreamTransform
from rotation_merge.symmetry.translation import TranslationTransform

__all__ = [
    "KINDS",
    "TRANSFORMS",
    "ConvolutionTransform",
    "DirectSum",
    "Exchange",
    "ExpertTransform",
    "GroupElement",
    "HeadTransform",
    "LatentTransform",
    "MixerTransform",
    "Monomial",
    "NeuronTransform",
    "Orthogonal",
    "Permutation",
    "Planar",
    "ScaledElement",
    "Scaling",
    "SpaceTransform",
    "StreamGroup",
    "StreamTransform",
    "TranslationTransform",
]
