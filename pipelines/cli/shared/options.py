"""Options that several verbs share, and how they become settings."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from headscan.pipelines.cli.shared import arguments
from headscan.pipelines.runs.terminal import printable_lines

if TYPE_CHECKING:
    from headscan.analysis.store.store import Store
    from headscan.cluster.placement.choose import Placement, PlacementRequest, Plan
    from headscan.cluster.placement.devices import Node
    from headscan.cluster.tasks.pool import Pool
    from headscan.model_spec import ModelSpec
    from headscan.pipelines.corpora import CorpusSpec
    from headscan.pipelines.evaluate.run_evaluation import EvaluateConfig

#: The name by which the bundled model is called.
DEMO_MODEL = "demo"

#: Length of a task's prompt that memory is set aside for; longer ones run alone, or not at all.
TASK_TOKENS = 2048

#: Numbers that weights can be loaded as.
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")

#: Shortest silence of a worker that can be told from a busy machine, in seconds.
_LEAST_SILENCE = 1.0


def add_model(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The model and how it is loaded."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?" if optional else None,
        help="folder saved by transformers, hub name, or `demo`: the bundled model",
    )
    group = parser.add_argument_group("model")
    group.add_argument("--revision", help="branch, tag or commit on the hub")
    group.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="auto (as saved), float32, bfloat16 or float16 (default: auto)"
    )
    group.add_argument("--trust-remote-code", action="store_true", help="let Python code that comes with the model run")
    group.add_argument("--pickled-weights", action="store_true", help="also load weights that are not safetensors")


def add_devices(parser: argparse.ArgumentParser) -> None:
    """Where the replicas run."""
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--device", type=arguments.device, default="auto", help="auto, cpu, cuda or cuda:N (default: auto)"
    )
    group.add_argument(
        "--placement",
        choices=("auto", "whole", "sharded", "pipeline", "streamed"),
        default="auto",
        help="whole: a copy a device; sharded: a copy over GPUs of one node; pipeline: layer ranges on devices of any "
        "nodes; streamed: one range of layers at a time on one device (default: the first of these that fits)",
    )
    group.add_argument(
        "--replicas", type=arguments.count, help="copies of the model (default: as many as the GPUs hold, one on a CPU)"
    )
    group.add_argument(
        "--gpus-per-replica", type=arguments.count, help="GPUs of a sharded copy (default: the fewest that fit)"
    )
    group.add_argument("--stages", type=arguments.count, help="stages of a pipeline (default: the fewest that fit)")
    group.add_argument(
        "--memory",
        type=arguments.byte_size,
        help="what streaming may take of its device, such as 2GiB (default: what is free)",
    )
    group.add_argument(
        "--offload",
        choices=("cpu", "disk"),
        help="where a sharded copy keeps the layers that its devices have no room for (default: nowhere)",
    )
    group.add_argument(
        "--ray-address", help="a running Ray cluster (default: a local Ray when there are several replicas)"
    )
    group.add_argument(
        "--silence-limit",
        type=arguments.seconds(_LEAST_SILENCE),
        default=300.0,
        metavar="SECONDS",
        help="heartbeat timeout of Ray workers, in seconds (default: 300)",
    )
    group.add_argument(
        "--start-timeout",
        type=arguments.seconds(_LEAST_SILENCE),
        default=600.0,
        metavar="SECONDS",
        help="longest wait for a first worker on a Ray cluster, in seconds (default: 600)",
    )
    group.add_argument(
        "--batch-tokens",
        type=arguments.count,
        help="tokens of one forward pass, padding included (default: 8192, or what there is room for within --memory)",
    )


def add_store(parser: argparse.ArgumentParser) -> None:
    """The DuckDB file."""
    parser.add_argument("--store", default="headscan.duckdb", help="the DuckDB file (default: headscan.duckdb)")
    parser.add_argument(
        "--lock-timeout",
        type=arguments.seconds(0),
        default=30.0,
        metavar="SECONDS",
        help="how long to wait while another process has the store open (default: 30)",
    )


def add_resume(parser: argparse.ArgumentParser) -> None:
    """Whether a run resumes with other software."""
    parser.add_argument(
        "--resume-anyway",
        action="store_true",
        help="resume an unfinished run even if packages, headscan, the device or the model's code files changed since; "
        "both are recorded (default: an error names the changes)",
    )


def add_corpus(parser: argparse._ArgumentGroup) -> None:
    """Which texts."""
    parser.add_argument("--config", help="configuration of a data set on the hub")
    parser.add_argument("--split", default="train", help="split of a data set on the hub (default: train)")
    parser.add_argument("--column", help="column with the text (default: `text`, or the only one of strings)")
    parser.add_argument("--corpus-revision", help="commit of a data set on the hub")


def corpus_spec(options: argparse.Namespace, limit_documents: int | None = None) -> CorpusSpec:
    """What to read."""
    from headscan.pipelines.corpora import CorpusSpec

    return CorpusSpec(
        options.corpus,
        config=options.config,
        split=options.split,
        column=options.column,
        revision=options.corpus_revision,
        limit_documents=limit_documents,
    )


def add_tasks(parser: argparse.ArgumentParser) -> None:
    """What is asked, and how."""
    group = parser.add_argument_group("tasks")
    group.add_argument(
        "--tasks", type=arguments.words, required=True, help="lm-eval tasks, groups or tags, with commas between"
    )
    group.add_argument("--include-path", help="folder with more tasks")
    group.add_argument(
        "--num-fewshot", type=arguments.whole(0), help="examples in the prompt (default: as the task says)"
    )
    group.add_argument("--limit", type=arguments.count, help="questions a task (default: all)")
    group.add_argument(
        "--apply-chat-template", action="store_true", help="put prompts into the tokenizer's chat template"
    )
    group.add_argument(
        "--fewshot-as-multiturn",
        action=argparse.BooleanOptionalAction,
        help="examples as turns of the chat (default: with a chat template)",
    )
    group.add_argument(
        "--bos", choices=("auto", "always", "never"), default="auto", help="BOS in front of a prompt (default: auto)"
    )
    group.add_argument(
        "--share-prefixes",
        action=argparse.BooleanOptionalAction,
        help="read what prompts begin with alike once (default: where the arms can still be compared)",
    )
    group.add_argument(
        "--mmlu-cloze",
        action="store_true",
        help="also ask the MMLU questions among the tasks without letters, by the likelihood of the answers' texts (as "
        "lm-eval's mmlu_continuation): letters alone can be lost while the knowledge stays",
    )
    group.add_argument(
        "--recall",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also ask for needles in a haystack and for copies of random tokens (default: yes)",
    )
    group.add_argument(
        "--recall-lengths",
        type=arguments.listed(arguments.count),
        help="their lengths in tokens, with commas between (default: powers of two from 256 to 4096 that fit)",
    )
    group.add_argument(
        "--recall-questions",
        type=arguments.count,
        metavar="N",
        help="recall questions of each kind at each length, a multiple of 4 (default: 400 of each kind over all "
        "lengths; an arm that loses none and changes 4 %% of the answers is then shown to keep recall in 99 %% of "
        "cases if the model answers 90 %% right, in 53 %% if 65 %%)",
    )


def add_confirm(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The option that splits a sweep's questions."""
    parser.add_argument(
        "--confirm",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="select the best arm of a sweep on one half of the questions and judge it on the other half (of the recall"
        " texts one of four selects); --no-confirm uses all questions for both, and does not correct the interval for"
        " the selection (default: --confirm)",
    )


def evaluate_config(options: argparse.Namespace, spec: ModelSpec) -> EvaluateConfig:
    """What an evaluation depends on, but for the tokens of a batch, which follow from the placement."""
    from headscan.pipelines.evaluate.run_evaluation import EvaluateConfig
    from headscan.pipelines.evaluate.tasks import TaskConfig
    from headscan.pipelines.recall import RecallPlan

    return EvaluateConfig(
        model=spec,
        tasks=TaskConfig(
            names=options.tasks,
            include_path=options.include_path,
            num_fewshot=options.num_fewshot,
            limit=options.limit,
            apply_chat_template=options.apply_chat_template,
            fewshot_as_multiturn=options.fewshot_as_multiturn,
            bos=options.bos,
            mmlu_cloze=options.mmlu_cloze,
        ),
        recall=RecallPlan(lengths=options.recall_lengths, questions=options.recall_questions)
        if options.recall
        else None,
        share_prefixes=options.share_prefixes,
    )


def model_spec(options: argparse.Namespace) -> ModelSpec:
    """What to load."""
    from headscan.model_spec import ModelSpec

    source = options.model
    if source == DEMO_MODEL and not Path(source).exists():
        from headscan.pipelines.demo import MODEL_FOLDER

        source = str(MODEL_FOLDER)
    return ModelSpec(
        source, options.dtype, options.revision, options.trust_remote_code, safetensors=not options.pickled_weights
    )


def placement(options: argparse.Namespace, spec: ModelSpec, *, tokens: int, evaluates: bool = False) -> Plan:
    """Where to run, said to the user before anything is loaded, and the tokens of a forward pass.

    They are those that are asked for, whatever is free now, so that the same command resumes a run; where the memory is
    named instead, they follow from that.

    Args:
        tokens: Of the longest sequence.
        evaluates: Tasks are answered.
    """
    from headscan.cluster.placement.choose import BATCH_TOKENS, place

    plan = place(spec.sizes(tokens), nodes(options), placement_request(options, evaluates=evaluates))
    for refusal in plan.why:
        say(f"not {refusal}")
    say(plan.placement.describe())
    if options.batch_tokens is None and options.memory is not None:
        return plan
    asked = options.batch_tokens or BATCH_TOKENS
    if plan.batch_tokens < asked:
        say(f"batches of {plan.batch_tokens} tokens fit; larger ones are halved when memory runs out")
    return replace(plan, batch_tokens=asked)


def nodes(options: argparse.Namespace) -> tuple[Node, ...]:
    """The machines that there are: of the Ray cluster that is named, or this one."""
    from headscan.cluster.placement.devices import ray_nodes, this_machine

    if not options.ray_address:
        return (this_machine(),)
    from headscan.cluster.actors.session import connect, import_ray

    connect(options.ray_address)
    return ray_nodes(import_ray(local=False))


def placement_request(options: argparse.Namespace, *, evaluates: bool = False) -> PlacementRequest:
    """What the user asks of the placement."""
    from headscan.cluster.placement.choose import PlacementRequest
    from headscan.pipelines.runs.openmp import max_threads

    return PlacementRequest(
        placement=options.placement,
        replicas=options.replicas,
        stages=options.stages,
        gpus_per_replica=options.gpus_per_replica,
        memory=options.memory,
        device=options.device,
        batch_tokens=options.batch_tokens,
        offload=options.offload,
        evaluates=evaluates,
        max_threads=max_threads(),
    )


def open_replicas(options: argparse.Namespace, spec: ModelSpec, place: Placement) -> Pool:
    """The pool for a placement."""
    from headscan.cluster.actors.timeouts import Timeouts
    from headscan.cluster.pools.open_pool import open_pool

    return open_pool(
        spec,
        place,
        on_cluster=bool(options.ray_address),
        timeouts=Timeouts(options.silence_limit, options.start_timeout),
    )


def open_store(options: argparse.Namespace, *, writes: bool = False) -> Store:
    """The store; a wait for somebody else's lock is reported.

    Args:
        writes: The verb will write it: a place that cannot be written is refused now, before anything is measured.

    Raises:
        OSError: The folder that holds the store, or is to hold it, cannot be written.
    """
    from headscan.analysis.store.store import Store

    path = Path(options.store)
    if writes and not path.exists():
        folder = next(parent for parent in path.absolute().parents if parent.exists())
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "not a folder that can hold the store", str(folder))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "the store cannot be written there", str(folder))
    return Store(options.store, lock_timeout=options.lock_timeout, on_wait=say)


def quiet_libraries() -> None:
    """Keep other libraries' bars out of the output of a command."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def say(line: str) -> None:
    """A line about the work; results alone go to standard output."""
    print(printable_lines(line), file=sys.stderr, flush=True)
