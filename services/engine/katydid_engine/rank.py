"""One rank: loads its share of the model, then schedules and computes (the first of its group) or only computes."""

from __future__ import annotations

import dataclasses
import functools
import gc
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from katydid_kernels.peer_reduce import PeerReducer
from katydid_runtime.block_hash import BLOCK_TOKENS
from katydid_runtime.errors import EngineLostError, SettingsError

from katydid_engine.block_pool import BlockPool
from katydid_engine.channel import BlockingChannel
from katydid_engine.collectives import TorchCollectives
from katydid_engine.compiled_grammars import CompiledGrammars
from katydid_engine.decode_options import captures, draft_depth, plans_ahead
from katydid_engine.draft_depth import DraftDepth
from katydid_engine.eplb.rebalancer import BalanceState, Rebalancer
from katydid_engine.loader import load_model
from katydid_engine.lockstep import Lockstep
from katydid_engine.messages import ExpertBalance, Ready, Stop
from katydid_engine.model_config import read_model_config
from katydid_engine.models.decoder_lm import DecoderLM
from katydid_engine.page_budget import count_pages
from katydid_engine.peer_rooms import copies_of, expert_peers_of, peers_of
from katydid_engine.plan import StepOutput, StepPlan
from katydid_engine.plan_ring import PlanReader, PlanWriter
from katydid_engine.planning.memory import check_memory
from katydid_engine.profiling import StepProfiler
from katydid_engine.quantization import Scheme, scheme_to_apply
from katydid_engine.rank_groups import RankGroups, join_groups
from katydid_engine.request import Request
from katydid_engine.runner import Runner
from katydid_engine.scheduler import Scheduler, SchedulerConfig
from katydid_engine.slot_memory import SlotMemory
from katydid_engine.sparse_prefill import SparsePrefill
from katydid_engine.staging import Staging
from katydid_engine.start_times import StartTimes
from katydid_engine.step_loop import StepLoop
from katydid_engine.step_outcome import Launched
from katydid_engine.step_thread import OwnThread
from katydid_engine.token_budget import TokenBudget
from katydid_engine.warm_up import WarmUp
from katydid_engine.worker_config import WorkerConfig

__all__ = ["work"]

_FOLLOW_POLL_S = 1.0
_LOAD_TIMEOUT_S = 1800.0
_FAREWELL_S = 0.5
_IDLE_ROUND = b""


def work(config: WorkerConfig, channel: BlockingChannel) -> None:
    """Runs one rank until it is told to stop.

    Raises:
        KatydidError: the model cannot be loaded as configured.
        ChannelClosed: the face is gone.
    """
    times = StartTimes(config.started_at)
    times.over("imports")
    # Hundreds of thousands of objects that stay: a collection that looked at them took up to 0.1 s, between two steps.
    gc.freeze()
    torch.set_num_threads(config.threads)
    groups = _join_groups(config)
    collectives = groups.tensor
    device = torch.device(config.device)
    if device.type == "cuda":
        _choose_gpu(device)
        _check_memory(config, device)
    _meet(config, device)
    peers, expert_peers = peers_of(config, groups, device), expert_peers_of(config, groups, device)
    times.over("ranks and device")
    model = load_model(
        Path(config.folder),
        device=device,
        dtype=getattr(torch, config.dtype),
        plan=config.plan,
        collectives=collectives,
        experts=groups.experts,
        stage=groups.stage,
        micro_batches=config.micro_batches,
        peers=peers,
        copies=copies_of(config, groups, device),
        expert_peers=expert_peers,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    if config.sparse_prefill is not None:
        model.use_sparse_prefill(SparsePrefill.parse(config.sparse_prefill))
    _meet(config, device)
    times.over("weights")
    drafts, ahead = draft_depth(config, model), plans_ahead(config)
    warm_up = _warm_up(config, model, drafts)
    num_pages = count_pages(
        model,
        config,
        TorchCollectives() if config.plan.pp > 1 else collectives,
        reserved_bytes=warm_up.measure(model, collectives) if warm_up.capture else 0,
    )
    times.over("memory of steps")
    grammars = CompiledGrammars(Path(config.folder), model.config.vocab_size, model.config.eos_token_ids)
    runner = Runner(
        model,
        num_pages,
        collectives=collectives,
        slots=_map_staging(config, model),
        grammars=grammars if config.member == 0 else None,
        drafts=drafts is not None,
        ahead=ahead,
        check=functools.partial(_check_peers, [each for each in (peers, expert_peers) if each is not None]),
    )
    warm_up.run(runner)
    gc.collect()
    gc.freeze()
    times.over("warm-up")
    lockstep = None
    if groups.step.size > 1:
        lockstep = Lockstep(groups.step, model.take_part, _rebalancer(config, model, groups, channel))
        model.before_pass = lockstep.enter
        if drafts is not None:
            drafts.follow(lambda: lockstep.drafts)
    ready = Ready(
        num_pages=num_pages,
        max_model_tokens=min(config.max_model_tokens, model.config.max_positions, num_pages * BLOCK_TOKENS),
        start_s=times.seconds,
    )
    if config.member == 0:
        # A GPU is a thread of its own: its stream carries out what is launched, in order. Where ranks pass together
        # steps begin where they are planned on a CPU too, for that thread and this one would join their rounds.
        on_host = ahead and device.type == "cpu" and lockstep is None
        thread = OwnThread(functools.partial(torch.set_num_threads, config.threads)) if on_host else None
        loop = _lead(config, channel, runner, model, grammars, lockstep, drafts, thread, ready, warm_up, ahead=ahead)
        channel.send(ready)
        turn = loop.run
    else:
        channel.send(ready)
        turn = functools.partial(_follow, config, channel, runner, lockstep)
    try:
        turn()
    except EngineLostError:
        # Ranks that were told to stop leave one after the other.
        if not any(isinstance(message, Stop) for message in channel.receive(_FAREWELL_S)):
            raise


def _warm_up(config: WorkerConfig, model: DecoderLM, drafts: DraftDepth | None) -> WarmUp:
    """On a GPU with the largest step and the longest context there can be; a host's memory is not cut that fine."""
    depths = (0,) if drafts is None else drafts.depths
    if model.device.type != "cuda":
        return WarmUp(batch_tokens=8, sequences=1, tokens=9, depths=depths, capture=False)
    longest = min(config.max_model_tokens, model.config.max_positions)
    return WarmUp(
        batch_tokens=config.max_batch_tokens,
        sequences=config.max_sequences,
        tokens=longest,
        depths=depths,
        capture=captures(config, model),
        chunks=not model.dispatched,
        sparse=config.sparse_prefill is not None,
        halved=model.halves_in_graphs,
    )


def _lead(
    config: WorkerConfig,
    channel: BlockingChannel,
    runner: Runner,
    model: DecoderLM,
    grammars: CompiledGrammars,
    lockstep: Lockstep | None,
    drafts: DraftDepth | None,
    thread: OwnThread | None,
    ready: Ready,
    warm_up: WarmUp,
    *,
    ahead: bool,
) -> StepLoop:
    pool = BlockPool(ready.num_pages)
    scheduler = Scheduler(
        SchedulerConfig(
            max_model_tokens=ready.max_model_tokens,
            max_batch_tokens=config.max_batch_tokens,
            max_sequences=config.max_sequences,
            eos_token_ids=frozenset(model.config.eos_token_ids),
            watermark_pages=ready.num_pages // 100,
            sparse=SparsePrefill.parse(config.sparse_prefill) if config.sparse_prefill else None,
            queue_delay_s=config.faults.queue,
        ),
        pool,
        time.monotonic,
        config.staging.writing if config.staging is not None else range(0),
        drafts,
        TokenBudget(
            config.tpot_target_s,
            BLOCK_TOKENS,
            *(warm_up.chunk_sizes.get(sparse, ()) for sparse in (False, True)),
            alone_sizes=warm_up.alone_sizes,
        ),
        config.ttft_target_s,
    )
    writer = PlanWriter(config.ring.memory, config.ring.bells) if config.ring is not None else None
    publish = (lambda _: None) if writer is None else writer.write
    launch = functools.partial(_launch, runner, lockstep, drafts)
    return StepLoop(
        channel,
        scheduler,
        pool,
        run=lambda plan: launch(plan)(),
        publish=lambda plan: publish(pickle.dumps(plan)),
        peers=None if lockstep is None else _Peers(lockstep, publish),
        prepare=functools.partial(_prepare, grammars, model),
        profiler=StepProfiler(),
        faults=config.faults,
        thread=thread,
        launch=launch if ahead and thread is None else None,
    )


def _prepare(grammars: CompiledGrammars, model: DecoderLM, request: Request) -> None:
    """Begins what a request needs before its first step."""
    if request.sampling.grammar is not None:
        grammars.prepare(request.sampling.grammar)
    if request.sparse_prefill:
        model.expect(len(request.prompt))


def _rebalancer(
    config: WorkerConfig, model: DecoderLM, groups: RankGroups, channel: BlockingChannel
) -> Rebalancer | None:
    if not config.plan.redundant_experts:
        return None

    def tell(state: BalanceState) -> None:
        if config.member == 0:
            channel.send(ExpertBalance(**dataclasses.asdict(state)))

    rebalancer = Rebalancer(model.dispatched, groups.movers, interval=config.rebalance_passes, tell=tell)
    rebalancer.connect()
    return rebalancer


def _launch(
    runner: Runner, lockstep: Lockstep | None, drafts: DraftDepth | None, plan: StepPlan
) -> Callable[[], StepOutput]:
    """``runner.launch``; while the device computes, this rank does what is due between passes."""
    if lockstep is not None and drafts is not None:
        lockstep.expect(len(plan.samples), drafts.wish)
    launched = runner.launch(plan)
    if lockstep is not None:
        lockstep.meanwhile()
    return launched.output


class _Peers:
    """The idle rounds of a group's first member, which its other members join with it."""

    def __init__(self, lockstep: Lockstep, publish: Callable[[bytes], None]) -> None:
        self._lockstep = lockstep
        self._publish = publish

    @property
    def patience_s(self) -> float:
        return self._lockstep.patience_s

    def idle(self) -> None:
        self._publish(_IDLE_ROUND)
        self._lockstep.idle()


def _check_peers(peers: Sequence[PeerReducer]) -> None:
    """Raises EngineLostError when another rank did not write what this one's kernels waited for."""
    try:
        for each in peers:
            each.check()
    except RuntimeError as error:
        raise EngineLostError(f"a rank of the group: {error}") from error


def _follow(config: WorkerConfig, channel: BlockingChannel, runner: Runner, lockstep: Lockstep | None) -> None:
    """Carries out the first member's plans, and joins its idle rounds, until the face says stop or is gone."""
    assert config.ring is not None
    index = config.member - 1
    reader = PlanReader(config.ring.memory, index, len(config.ring.bells), config.ring.bells[index])
    before: Launched | None = None
    while True:
        body = reader.read(_FOLLOW_POLL_S, also=channel.fileno())
        if body == _IDLE_ROUND:
            assert lockstep is not None
            lockstep.idle()
        elif body is not None:
            # As far ahead of the device as the first member may be, so that no rank waits for this one.
            launched = runner.launch(pickle.loads(body))
            if before is not None:
                before.output()
            before = launched
        elif any(isinstance(message, Stop) for message in channel.receive(0)):
            return


def _choose_gpu(device: torch.device) -> None:
    """Raises SettingsError where torch sees no such GPU."""
    index, seen = device.index or 0, torch.cuda.device_count()
    if index >= seen:
        raise SettingsError(
            f"there is no GPU {index}: torch {torch.__version__} sees {seen}", field="device", value=str(device)
        )
    torch.cuda.set_device(device)


def _check_memory(config: WorkerConfig, device: torch.device) -> None:
    """Raises SettingsError where this rank's weights cannot fit."""
    model = read_model_config(Path(config.folder))
    scheme = scheme_to_apply(config.quantization, model.quantization)
    stored = model.quantization.scheme if scheme is Scheme.NONE else scheme
    size = {Scheme.NONE: getattr(torch, config.dtype).itemsize, Scheme.FP8: 1.0, Scheme.W4A8: 0.5}[stored]
    check_memory(model, config.plan, free_bytes=torch.cuda.mem_get_info(device)[0], weight_bytes=size)


def _join_groups(config: WorkerConfig) -> RankGroups:
    if config.plan.world_size == 1:
        return RankGroups()
    dist.init_process_group(
        "nccl" if config.device.startswith("cuda") else "gloo",
        init_method=config.rendezvous,
        rank=config.rank,
        world_size=config.plan.world_size,
        timeout=timedelta(seconds=_LOAD_TIMEOUT_S),
    )
    return join_groups(config.plan, config.rank, timeout_s=config.rank_timeout_s)


def _meet(config: WorkerConfig, device: torch.device) -> None:
    """Waits for ranks that are still starting, or loading: what follows waits no longer than ``rank_timeout_s``."""
    if config.plan.world_size > 1:
        dist.all_reduce(torch.zeros(1, device=device))


def _map_staging(config: WorkerConfig, model: DecoderLM) -> SlotMemory | None:
    if config.staging is None or config.staging_memory is None:
        return None
    probe = model.new_kv_cache(1)
    object_bytes = probe.bytes_per_page * min(config.plan.tp, model.config.num_kv_heads)
    if object_bytes != config.staging.slot_bytes:
        raise SettingsError(
            f"a block of this checkpoint has {object_bytes} bytes, its config.json says {config.staging.slot_bytes}: "
            "the number of MTP layers differs"
        )
    staging = Staging(config.staging, config.staging_memory)
    objects = torch.frombuffer(staging.memory, dtype=torch.uint8).view(-1, config.staging.slot_bytes)
    return SlotMemory(objects, model.device)
