"""One Megatron rank of the policy: logprobs, gradients, optimizer steps. Knows nothing of Ray or of the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from lora_rl.algorithm import LossSettings, MetricSum, Normaliser, as_floats, merge, policy_loss
from lora_rl.lora.svd import spectrum_of
from lora_rl.lora.targets import adapter_modules
from lora_rl.policy.logprobs import vocab_parallel_logprobs
from lora_rl.policy.merged_jumps import MergedJumps
from lora_rl.policy.microbatch import Microbatch, at_positions, attention_tokens, lay_out, padded_rows, unable_to_share
from lora_rl.policy.model import THETA, PolicyModel, build_policy_model
from lora_rl.policy.platform import Platform

if TYPE_CHECKING:
    from lora_rl.algorithm import Row
    from lora_rl.config import RunConfig
    from lora_rl.rollout.types import TrainBatch


# Corrections that give tokens the weight 0, and how many first steps may consist of such tokens only.
_MASKING, _MOST_EXCUSED = ("icepop", "seq_mask"), 8


class AdapterGradientError(RuntimeError):
    """An adapter took part in no gradient although the batch carried a signal: it would never train."""


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step reports.

    Attributes:
        metrics: undivided sums over this rank's shard; empty except on the last pipeline stage of tp rank 0.
        grad_norm: global gradient norm before clipping; 0 when the step was skipped.
        learning_rate: rate used in this step.
        updated: whether the optimizer stepped (false when the batch had no token to train on).
    """

    metrics: dict[str, MetricSum]
    grad_norm: float
    learning_rate: float
    updated: bool


class PolicyRank:
    """The model, optimizer and schedule of one rank, with the collective operations every rank calls alike."""

    def __init__(self, config: RunConfig, platform: Platform) -> None:
        """Build the model and its optimizer. The process group must be up (`initialise_parallel`)."""
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config = config
        self.platform = platform
        self.model: PolicyModel = build_policy_model(config, platform)
        self.temperature = config.policy.generation.temperature
        self.loss_settings = loss_settings(config)
        self._forward_backward = get_forward_backward_func()
        megatron = config.policy.megatron_cfg
        # With sequence parallelism each tensor-parallel rank has an equal share of the positions.
        self._positions_multiple = megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1
        self._parallel = parallel_state
        self.dp_size = parallel_state.get_data_parallel_world_size()
        self.dp_rank = parallel_state.get_data_parallel_rank()
        self.is_last_stage = parallel_state.is_pipeline_last_stage()
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.reports_metrics = self.is_last_stage and parallel_state.get_tensor_model_parallel_rank() == 0

        settings, schedule = config.policy.megatron_cfg.optimizer, config.policy.megatron_cfg.scheduler
        svd = config.policy.megatron_cfg.peft.svd
        peak = svd.sigma_lr if svd.enabled else settings.lr
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer=settings.optimizer,
                lr=peak,
                min_lr=settings.min_lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.adam_beta1,
                adam_beta2=settings.adam_beta2,
                adam_eps=settings.adam_eps,
                clip_grad=config.policy.max_grad_norm or 0.0,
                # The trainable parameters are float32 adapters whatever the base: no loss scaling, no master copies.
                bf16=False,
                fp16=False,
                params_dtype=torch.float32,
                use_distributed_optimizer=False,
            ),
            self.model.chunks,
            # Singular values are a parameter group of their own, without decay.
            config_overrides={ParamKey(name=f"*{THETA}"): {"wd_mult": 0.0}} if svd.enabled else None,
        )
        # A finite decay length is needed even for a constant rate, and it must exceed the warm-up.
        decay_steps = max(config.lr_decay_iters, schedule.lr_warmup_iters + 1)
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=schedule.lr_warmup_init,
            max_lr=peak,
            min_lr=settings.min_lr,
            lr_warmup_steps=schedule.lr_warmup_iters,
            lr_decay_steps=decay_steps,
            lr_decay_style=schedule.lr_decay_style,
            start_wd=settings.weight_decay,
            end_wd=settings.weight_decay,
            wd_incr_steps=decay_steps,
            wd_incr_style="constant",
        )
        model_config = self.model.module.config
        model_config.finalize_model_grads_func = finalize_model_grads
        if config.policy.megatron_cfg.distributed_data_parallel_config.overlap_grad_reduce:
            # Only the last microbatch of a step may start the reduction, and steps have different numbers of them.
            [chunk] = self.model.chunks
            model_config.no_sync_func = chunk.no_sync
        model_config.grad_scale_func = None
        model_config.timers = None
        self._gradients_checked = False
        self._excused = 0
        self.merged = MergedJumps(self.model)
        self._svd = svd.enabled
        self.freeze_reference()
        problem = unable_to_share(self.model.module, local_attention=platform.name == "cpu")
        if problem is not None and config.policy.share_prompts:
            raise ValueError(f"policy.share_prompts = true: cannot be done in this model: {problem}; use null")
        self.can_share_prompts = problem is None

    # -- what the loop calls -----------------------------------------------------------------------------------

    def train_step(
        self,
        shard: TrainBatch,
        microbatches: Sequence[Sequence[Row]],
        *,
        old_logprobs: np.ndarray | None = None,
        reference_logprobs: np.ndarray | None = None,
        supervised: bool = False,
    ) -> StepResult:
        """One optimizer step on this rank's shard. Every rank must call it with equally many microbatches.

        Gradients do not depend on how the step is cut into microbatches, data-parallel shards or padding: each
        token's loss is divided by counts of the *whole* step, and microbatches and shards add up.

        Args:
            shard: this data-parallel rank's sequences, with the global counts of the step.
            microbatches: rows of each microbatch, see `lay_out`; an empty one only keeps the ranks in step.
            old_logprobs: float32 [B, T], logprobs under the policy that started the batch; None when this is the
                batch's first and only update, where they equal the current ones and one forward pass suffices.
            reference_logprobs: float32 [B, T]; None when the KL coefficient is 0.
            supervised: minimise the negative log-likelihood of the completions instead of the policy loss.

        Raises:
            AdapterGradientError: after the first update with a signal, some adapter got no gradient.
        """
        if shard.global_tokens == 0:
            return StepResult({}, 0.0, self.learning_rate, updated=False)
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        results = self.forward_backward(
            shard,
            microbatches,
            old_logprobs=old_logprobs,
            reference_logprobs=reference_logprobs,
            supervised=supervised,
        )
        # Without loss scaling Megatron's optimizer looks at no gradient, and would go on with weights that are NaN.
        any_gradient = self._finite_gradients()
        if not self._gradients_checked and np.any(shard.advantages != 0):
            loss = self.config.loss_fn
            masks = loss.use_importance_sampling_correction and loss.importance_sampling_type in _MASKING
            # They may mask every token of a step: that says nothing of the adapters, unless it goes on.
            if any_gradient or not masks or self._excused == _MOST_EXCUSED:
                self._check_every_adapter_has_gradient()
                self._gradients_checked = True
            else:
                self._excused += 1
        # The schedule counts from the step about to be taken, so that the first step already has a rate above 0.
        self.scheduler.step(increment=1)
        rate = self.learning_rate
        updated, grad_norm, _ = self.optimizer.step()
        if not updated:
            raise RuntimeError(f"the optimizer took no step; the gradient norm is {float(grad_norm or 0.0)}")
        metrics = as_floats(merge([r["metrics"] for r in results])) if self.reports_metrics else {}
        return StepResult(metrics, float(grad_norm or 0.0), rate, updated=True)

    def forward_backward(
        self,
        shard: TrainBatch,
        microbatches: Sequence[Sequence[Row]],
        *,
        old_logprobs: np.ndarray | None = None,
        reference_logprobs: np.ndarray | None = None,
        supervised: bool = False,
    ) -> list[dict[str, Any]]:
        """Accumulate the gradients of one step into Megatron's buffers; arguments as in `train_step`.

        Returns:
            Per microbatch {"metrics": sums}, on the last pipeline stage.
        """
        normaliser = Normaliser(tokens=float(shard.global_tokens), sequences=float(shard.global_sequences))
        # Megatron divides by the number of microbatches and averages over data-parallel ranks; undo both.
        scale = len(microbatches) * self.dp_size

        def loss(microbatch: Microbatch, logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
            logprobs, entropy = self._logprobs(microbatch, logits)
            if supervised:
                nll, certainty = -logprobs[microbatch.mask].sum(), entropy[microbatch.mask].sum().detach()
                sums = {"nll": MetricSum(nll.detach(), "tokens"), "entropy": MetricSum(certainty, "tokens")}
                return nll / normaliser.tokens * scale, {"metrics": sums}
            rows = microbatch.sequences
            on_device = partial(self._rows_to_device, rows=rows, width=microbatch.mask.shape[1])
            output = policy_loss(
                self.loss_settings,
                logprobs=logprobs,
                advantages=self._vector_to_device(shard.advantages, rows),
                token_mask=microbatch.mask,
                sample_mask=microbatch.mask.any(dim=1),
                normaliser=normaliser,
                old_logprobs=on_device(old_logprobs),
                behaviour_logprobs=on_device(shard.behaviour_logprobs),
                reference_logprobs=on_device(reference_logprobs),
                entropy=entropy,
            )
            return output.loss * scale, {"metrics": output.metrics}

        return self._run(shard, microbatches, loss, forward_only=False)

    def logprobs(
        self,
        shard: TrainBatch,
        microbatches: Sequence[Sequence[Row]],
        *,
        reference: bool = False,
        temperature: float | None = None,
    ) -> np.ndarray | None:
        """Logprobs of the completion tokens, without gradients and without dropout.

        Args:
            reference: under the reference policy, see `freeze_reference`.
            temperature: divides the logits; None: the sampling temperature.

        Returns:
            float32 [B, T] (0 outside completions) on the last pipeline stage, None on the others.
        """

        def collect(microbatch: Microbatch, logits: torch.Tensor, non_loss_data: bool = True) -> dict[str, Any]:
            return {"rows": microbatch.sequences, "logprobs": self._logprobs(microbatch, logits, temperature)[0]}

        with self._as_reference() if reference else nullcontext(), self._without_dropout(), torch.no_grad():
            results = self._run(shard, microbatches, collect, forward_only=True)
        if not self.is_last_stage:
            return None
        out = np.zeros(shard.token_ids.shape, dtype=np.float32)
        for result in results:
            values = result["logprobs"].float().cpu().numpy()
            for row, line in zip(result["rows"], values, strict=False):
                out[row, : len(line)] = line[: out.shape[1]]
        return out

    @torch.no_grad()
    def freeze_reference(self) -> None:
        """Make the policy as it is now the reference; called whenever the run's starting point is set.

        With B = 0, or `loss_fn.reference_policy: base`, the reference is the model with its adapters switched off and
        takes no memory. Otherwise the adapters are copied. Those of SVD-LoRA hold their reference themselves: it is
        theta = 0.
        """
        adapters = adapter_modules(self.model.module).values()
        wanted = self.config.loss_fn.reference_policy == "start" and self.config.loss_fn.reference_policy_kl_penalty > 0
        spectra = [s for s in map(spectrum_of, adapters) if s is not None]
        if wanted and spectra:
            self._reference = [(s.theta, torch.zeros_like(s.theta)) for s in spectra]
        elif wanted and any(bool(a.linear_out.weight.count_nonzero()) for a in adapters):
            self._reference = [(p, p.detach().clone()) for a in adapters for p in a.parameters()]
        else:
            self._reference = None

    @contextmanager
    def _without_dropout(self) -> Iterator[None]:
        # Adapters have the only dropout there is. Mostly there is none, and no module to look for in every pass.
        wanted = self.config.policy.megatron_cfg.peft.dropout > 0
        modules = [a.dropout for a in adapter_modules(self.model.module).values()] if wanted else []
        for module in modules:
            module.eval()
        try:
            yield
        finally:
            for module in modules:
                module.train()

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        with self.merged.without(), self._with_reference_adapters():
            yield

    @contextmanager
    def _with_reference_adapters(self) -> Iterator[None]:
        if self._reference is None:
            with self.model.lora.disable_adapter(self.model.chunks):
                yield
            return
        live = [p.data for p, _ in self._reference]
        try:
            for parameter, frozen in self._reference:
                parameter.data = frozen
            yield
        finally:
            for (parameter, _), data in zip(self._reference, live, strict=True):
                parameter.data = data

    @property
    def learning_rate(self) -> float:
        """Rate of the adapters' parameter group."""
        return float(self.optimizer.param_groups[0]["lr"]) if self.optimizer.param_groups else 0.0

    def attention_tokens(self) -> float | None:
        """See `attention_tokens` in `lora_rl.policy.microbatch`; None: no prompts can be shared in this model."""
        return attention_tokens(self.model.module) if self.can_share_prompts else None

    def describe(self) -> dict[str, Any]:
        """Sizes for the log: parameters on this rank, trainable ones, adapters.

        What every tensor-parallel rank holds alike counts on the first one as trainable. `directions` are the trainable
        numbers of SVD-LoRA that the starting adapter gives an effect.
        """
        module = self.model.module
        first = self._parallel.get_tensor_model_parallel_rank() == 0
        own = [p for p in module.parameters() if first or getattr(p, "tensor_model_parallel", False)]
        spectra = [s for s in map(spectrum_of, adapter_modules(module).values()) if s is not None]
        return {
            "parameters": sum(p.numel() for p in module.parameters()),
            "trainable": sum(p.numel() for p in own if p.requires_grad),
            "adapters": len(adapter_modules(module)),
            **({"directions": sum(s.directions for s in spectra) if first else 0} if self._svd else {}),
        }

    # -- inside ------------------------------------------------------------------------------------------------

    def _run(
        self, shard: TrainBatch, microbatches: Sequence[Sequence[Row]], loss: Any, *, forward_only: bool
    ) -> list[Any]:
        """Drive Megatron's pipeline schedule over the microbatches."""

        def forward_step(iterator: Iterator[Microbatch], chunk: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            microbatch = next(iterator)
            # Without a mask, positions are 0, 1, 2, ... in every row, which is what Megatron takes by itself.
            shared = microbatch.position_ids if microbatch.hidden is not None else None
            with at_positions(self.model.module, shared):
                output = chunk(microbatch.tokens, microbatch.position_ids, microbatch.hidden)
            return output, partial(loss, microbatch)

        lay = partial(lay_out, shard, device=self.platform.device, multiple=self._positions_multiple)
        return self._forward_backward(
            forward_step_func=forward_step,
            # One at a time: a mask takes S^2 bytes per row.
            data_iterator=map(lay, microbatches),
            model=self.model.chunks,
            num_microbatches=len(microbatches),
            seq_length=max(shard.token_ids.shape[1], 1),
            micro_batch_size=max((len(rows) for rows in microbatches), default=1),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _logprobs(
        self, microbatch: Microbatch, logits: torch.Tensor, temperature: float | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 [B, T] logprob and entropy per completion token from logits [G, S, V/tp]; 0 elsewhere."""
        row, column = microbatch.predictors.unbind(1)
        # Logits of prompt positions, but for the last, are not even looked at.
        logprobs, entropy = vocab_parallel_logprobs(
            logits[row, column],
            microbatch.targets,
            temperature=temperature or self.temperature,
            vocab_size=self.model.vocab_size,
            group=self.tp_group,
        )
        blank = torch.zeros(microbatch.mask.shape, dtype=torch.float32, device=logits.device)
        place = microbatch.completion.unbind(1)
        return blank.index_put(place, logprobs), blank.index_put(place, entropy)

    def _rows_to_device(self, values: np.ndarray | None, *, rows: list[int], width: int) -> torch.Tensor | None:
        if values is None:
            return None
        if not rows:
            return torch.zeros(1, width, device=self.platform.device)
        return torch.from_numpy(np.ascontiguousarray(padded_rows(values[rows, :width], width))).to(self.platform.device)

    def _vector_to_device(self, values: np.ndarray, rows: list[int]) -> torch.Tensor:
        return torch.from_numpy(values[rows] if rows else np.zeros(1, np.float32)).to(self.platform.device)

    def _finite_gradients(self) -> bool:
        """Whether any gradient of any rank is not 0. Collective.

        Raises:
            RuntimeError: some gradient is no finite number.
        """
        found = torch.zeros(2, device=self.platform.device)
        for chunk in self.model.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                # One pass. A sum of finite numbers that overflows is a gradient that nobody wants, either.
                total = torch.linalg.vector_norm(buffer.grad_data, ord=1)
                found += torch.stack([~torch.isfinite(total), total != 0])
        if dist.get_world_size() > 1:
            dist.all_reduce(found)
        unusable, any_gradient = found.tolist()
        if unusable:
            raise RuntimeError("the gradients are not finite: no step was taken, the weights are those before it")
        return any_gradient > 0

    def _check_every_adapter_has_gradient(self) -> None:
        """With B = 0 only B receives a gradient in the first step, so one of the two factors is enough."""
        dead = [
            name
            for name, adapter in adapter_modules(self.model.module).items()
            if not any(bool(p.main_grad.count_nonzero()) for p in adapter.parameters() if p.requires_grad)
        ]
        if dead:
            raise AdapterGradientError(
                f"{len(dead)} of {len(adapter_modules(self.model.module))} adapters received no gradient in the first "
                f"update, so they would never train: {', '.join(sorted(dead)[:8])}"
            )


def loss_settings(config: RunConfig) -> LossSettings:
    """The loss section of the configuration in the algorithm's own terms."""
    section = config.loss_fn
    corrected = section.use_importance_sampling_correction
    # Bounds and type default to something useful in the configuration and mean nothing without the correction.
    lower, upper = section.importance_sampling_bounds if corrected else (None, None)
    return LossSettings(
        policy_loss=section.policy_loss,
        # In the reward it has done its work before the loss.
        reference_policy_kl_penalty=section.reference_policy_kl_penalty if section.kl_in_loss else 0.0,
        reference_policy_kl_type=section.reference_policy_kl_type,
        kl_input_clamp_value=section.kl_input_clamp_value,
        ratio_clip_min=section.ratio_clip_min,
        ratio_clip_max=section.ratio_clip_max,
        ratio_clip_c=section.ratio_clip_c,
        sapo_tau_pos=section.sapo_tau_pos,
        sapo_tau_neg=section.sapo_tau_neg,
        use_importance_sampling_correction=corrected,
        importance_sampling_level=section.importance_sampling_level,
        importance_sampling_type=section.importance_sampling_type if corrected else None,
        truncated_importance_sampling_ratio=upper,
        truncated_importance_sampling_ratio_min=lower,
        token_level_loss=section.token_level_loss,
        constant_length=config.policy.generation.max_new_tokens if section.constant_length_loss else None,
    )
