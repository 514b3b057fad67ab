"""Small random-weight models of all tested architectures.

One line of a table adds one.

`headscan models` lists them, and the tests measure each against a float64 reference. All have three layers, and six
heads where the architecture allows it; a hybrid has its attention in layers 0 and 2.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
)

from headscan.attention.discovery import discover
from headscan.models.loaded_model import LoadedModel
from headscan.testing.decoders import FAMILIES
from headscan.testing.family import GQA, HEADS, LAYERS, MHA, O_PROJ, VOCABULARY, Family


def _encoder(model_type: str, projection: str, values: str, config: dict[str, Any], **more: Any) -> Family:
    return Family(model_type, projection, config, AutoModelForMaskedLM, values={"encoder": values}, **more)


def _bert_like(model_type: str, config: dict[str, Any]) -> Family:
    attention = f"{model_type}.encoder.layer.{{}}.attention"
    return _encoder(model_type, f"{attention}.output.dense", f"{attention}.self.value", config)


ENCODERS: dict[str, Family] = {
    "bert": _bert_like("bert", MHA),
    "roberta": _bert_like("roberta", {**MHA, "max_position_embeddings": 1026}),  # the first two are never used
    "electra": _bert_like("electra", {**MHA, "embedding_size": 48}),
    "distilbert": _encoder(
        "distilbert",
        "distilbert.transformer.layer.{}.attention.out_lin",
        "distilbert.transformer.layer.{}.attention.v_lin",
        {**MHA, "hidden_dim": 64},
    ),
    "modernbert": _encoder(
        "modernbert",
        "model.layers.{}.attn.Wo",
        "model.layers.{}.attn.Wqkv",
        MHA | {"local_attention": 20, "global_attn_every_n_layers": 2, "cls_token_id": 0, "sep_token_id": 1},
        stacked=True,
    ),
}

_T5_SITES = {
    "encoder": "encoder.block.{}.layer.0.SelfAttention.o",
    "self": "decoder.block.{}.layer.0.SelfAttention.o",
    "cross": "decoder.block.{}.layer.1.EncDecAttention.o",
}
_BART_SITES = {
    "encoder": "model.encoder.layers.{}.self_attn.out_proj",
    "self": "model.decoder.layers.{}.self_attn.out_proj",
    "cross": "model.decoder.layers.{}.encoder_attn.out_proj",
}
_BART = {
    "d_model": 48,
    "max_position_embeddings": 1024,
    "scale_embedding": True,
    **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 64 for side in ("encoder", "decoder")},
}
_T5 = {"d_model": 48, "d_kv": 4, "d_ff": 64, "num_layers": LAYERS, "num_heads": HEADS}


def _encoder_decoder(model_type: str, sites: dict[str, str], values: str, config: dict[str, Any]) -> Family:
    return Family(model_type, sites, config, AutoModelForSeq2SeqLM, values={"encoder": values})


ENCODER_DECODERS: dict[str, Family] = {
    "t5": _encoder_decoder("t5", _T5_SITES, "encoder.block.{}.layer.0.SelfAttention.v", _T5),
    "bart": _encoder_decoder("bart", _BART_SITES, "model.encoder.layers.{}.self_attn.v_proj", _BART),
    "marian": _encoder_decoder("marian", _BART_SITES, "model.encoder.layers.{}.self_attn.v_proj", _BART),
}

#: Architectures that must be refused: a norm over all heads, one module for all layers, and an output that is the
#: difference of two attentions.
REFUSED: dict[str, Family] = {
    "bitnet": Family("bitnet", O_PROJ, GQA),
    "albert": Family("albert", "", MHA | {"embedding_size": 16}, AutoModelForMaskedLM),
    "diffllama": Family("diffllama", O_PROJ, GQA),
}

#: Every kind of site of every family.
SITES = [(name, "self") for name in [*FAMILIES, *ENCODERS]] + [
    (name, site) for name in ENCODER_DECODERS for site in ("encoder", "self", "cross")
]
ALL = FAMILIES | ENCODERS | ENCODER_DECODERS | REFUSED


def make_model(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, vocabulary: int = VOCABULARY
) -> PreTrainedModel:
    """Return a random model of a family.

    Its weights are large enough for non-uniform attention.
    """
    family = ALL[name]
    torch.manual_seed(seed)
    words = {"vocab_size": vocabulary, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    config = dict(family.config)
    if "hidden_size_per_layer_input" in config:
        config["vocab_size_per_layer_input"] = vocabulary
    if "text_config" in config:
        config["text_config"] = config["text_config"] | words
    # The default attention is sdpa for most architectures.
    model = family.auto.from_config(AutoConfig.for_model(family.model_type, **words, **config))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and not parameter_name.endswith("norm.weight"):
                parameter.normal_(std=0.18)
            elif parameter_name.endswith(".sinks"):
                parameter.normal_(mean=2.0)  # large enough to reduce the weights of many keys
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval().to(dtype)


def make_loaded(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> LoadedModel:
    """Return the loaded model of a family, without a checkpoint."""
    model = make_model(name, seed=seed, dtype=dtype)
    return LoadedModel(model, None, discover(model), name)
