"""The symmetry groups: one module each; elements act on one dimension, transforms on the axes of a space."""

from rotation_merge.groups.base import KINDS, GroupElement
from rotation_merge.groups.convolution import ConvolutionTransform
from rotation_merge.groups.direct_sum import DirectSum
from rotation_merge.groups.experts import ExpertTransform
from rotation_merge.groups.gains import Exchange
from rotation_merge.groups.heads import HeadTransform
from rotation_merge.groups.invertible import Invertible
from rotation_merge.groups.latent import LatentTransform
from rotation_merge.groups.mixer import MixerTransform
from rotation_merge.groups.monomial import Monomial
from rotation_merge.groups.neurons import NeuronTransform
from rotation_merge.groups.orthogonal import Orthogonal
from rotation_merge.groups.permutation import Permutation
from rotation_merge.groups.planar import Planar
from rotation_merge.groups.scaled import Scaled
from rotation_merge.groups.scaling import Scaling
from rotation_merge.groups.space import TRANSFORMS, SpaceTransform
from rotation_merge.groups.stream import StreamGroup, StreamTransform
from rotation_merge.groups.translation import TranslationTransform

__all__ = [
    "KINDS",
    "TRANSFORMS",
    "ConvolutionTransform",
    "DirectSum",
    "Exchange",
    "ExpertTransform",
    "GroupElement",
    "HeadTransform",
    "Invertible",
    "LatentTransform",
    "MixerTransform",
    "Monomial",
    "NeuronTransform",
    "Orthogonal",
    "Permutation",
    "Planar",
    "Scaled",
    "Scaling",
    "SpaceTransform",
    "StreamGroup",
    "StreamTransform",
    "TranslationTransform",
]
