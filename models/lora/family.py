"""Define a family with LoRA: the base is frozen; only the adapters are trained, saved and exchanged."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, Self

import torch
from torch import nn

from ...layers import Experts, attach_expert_lora, attach_lora, linears
from ...parallel_state import BadInput, Declaration, Layout, ParallelState, declarations
from ...system import literal
from ..base.causal_lm import CausalLM
from ..base.config import ModelConfig
from ..base.family import Family, making
from ..base.hugging_face_names import Link, shapes_of
from .config import LoraConfig, ends_with
from .targets import ExpertSite, Site, expert_sites, leaves, linear_sites

_LEFT_OUT = "What it names is left out by exclude_modules or layers_to_transform"


@dataclass(frozen=True)
class AdaptedFamily(Family):
    """Add the adapters of ``lora`` to the family ``base``.

    ``declarations`` and ``links`` are those of the adapters only, and Hugging Face names are those of PEFT.
    Make it with ``adapted``.
    """

    base: Family = field(kw_only=True)
    lora: LoraConfig = field(kw_only=True)

    def check_layout(self, config: ModelConfig, layout: Layout) -> None:
        self.base.check_layout(config, layout)

    def build(
        self,
        config: ModelConfig,
        *,
        split: Sequence[int] | None = None,
        state: ParallelState | None = None,
        device: str | torch.device = "meta",
        dtype: torch.dtype = torch.float32,
        base_dtype: torch.dtype | None = None,
    ) -> CausalLM:
        """Return the model with adapters in ``dtype`` and all other parameters frozen in ``base_dtype``
        (default: ``dtype``).
        """
        model = self.base.build(config, split=split, state=state, device=device, dtype=base_dtype or dtype)
        model.family = self
        model.requires_grad_(False)
        linears_here, modules = dict(linears(model)), dict(model.named_modules())
        with making(dtype, device):
            for site in self.sites(config):
                if (layer := linears_here.get(site.layer)) is not None:
                    options = self._options(site) | {"dropout": self.lora.lora_dropout}
                    attach_lora(layer, outputs=site.outputs or None, **options)
            for stack in self.stacks(config):
                if isinstance(experts := modules.get(stack.layer), Experts):
                    names = [output for output, _, _ in stack.outputs]
                    attach_expert_lora(experts, names, **self._options(stack))
        return model

    def _options(self, site: Site | ExpertSite) -> dict[str, Any]:
        rank, alpha = self.lora.rank_of(site.name), self.lora.alpha_of(site.name)
        return {"r": rank, "alpha": alpha, "rslora": self.lora.use_rslora}

    def declared(self, model: nn.Module) -> dict[str, Declaration]:
        """Return the declarations of the adapters."""
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        return {name: declaration for name, declaration in declarations(model).items() if name in trained}

    def links(self, config: ModelConfig) -> tuple[Sequence[Link], Mapping[str, tuple[int, ...]]]:
        """Return the links of the adapters, and the shapes of PEFT's tensors."""
        sites: list[Site | ExpertSite] = [*self.sites(config), *self.stacks(config)]
        links = [link for site in sites for link in site.links(self.lora.rank_of(site.name))]
        return links, shapes_of(links)

    def links_of_all(self, config: ModelConfig) -> Sequence[Link]:
        """Return the links of base and adapters."""
        return [*self.base.links(config)[0], *self.links(config)[0]]

    @lru_cache(maxsize=16)
    def stacks(self, config: ModelConfig) -> tuple[ExpertSite, ...]:
        """Return the adapted stacks of experts, in the order of the model's tensors."""
        targeted = [site for site in expert_sites(self.base, config) if self.lora.targets_stack(site.name)]
        second = {site.layer for site in targeted if site.outputs[0][0] == "down"}
        # PEFT wraps a module again for its second parameter: the one of the first is then inside.
        inner = {site: site.layer in second and site.outputs[0][0] != "down" for site in targeted}
        return tuple(
            replace(site, holder=f"{site.holder}.base_layer") if inner[site] else site for site in inner
        )

    @lru_cache(maxsize=16)
    def sites(self, config: ModelConfig) -> tuple[Site, ...]:
        """Return the adapted linear layers, in the order of the model's tensors.

        Raises ``BadInput`` if there is none, or if a target is not a linear layer of a block.
        """
        all_sites, lora = linear_sites(self.base, config), self.lora
        if not all_sites and lora.target_modules != ():
            expected = f"[]: no linear layer of this {self.base.model_type} takes adapters"
            raise BadInput("lora", "target_modules", expected=expected, found=literal(lora.target_modules))
        targeted = tuple(site for site in all_sites if lora.targets(site.name))
        if not lora.all_linear:
            _check_no_experts(self, config)
            in_sites = {site.stored for site in all_sites}
            for name in self.base.links(config)[1]:
                module = name.removesuffix(".weight")
                if name.endswith(".weight") and name not in in_sites and lora.targets(module):
                    others = "LoRA on embeddings, norms, routers and the output layer is not supported"
                    expected = f"linears of the blocks: {others}"
                    raise BadInput("lora", "target_modules", expected=expected, found=module)
        if not targeted and lora.layers_pattern:
            expected = f"what precedes a block's number in {all_sites[0].name}"
            raise BadInput("lora", "layers_pattern", expected=expected, found=literal(lora.layers_pattern))
        if not targeted and not (lora.target_modules == () and lora.target_parameters):
            expected, names = f"targets among {leaves(all_sites)}", lora.target_modules
            left_out = isinstance(names, tuple) and any(_named(name, all_sites) for name in names)
            todo = _LEFT_OUT if left_out else ""
            raise BadInput("lora", "target_modules", expected=expected, found=literal(names), todo=todo)
        return targeted

    def of_trained(self, config: ModelConfig) -> tuple[Self, list[str]]:
        """Return the family without adapters of what no loss of tokens reads, such as an image encoder's, and
        the names of the modules that had them.
        """
        still = {name.rpartition(".")[0] for name in self.base.untrained(config)}
        idle = [
            site.name
            for site in (self.sites(config) if still else ())
            if still & {site.layer, *(f"{site.layer}.{output}" for output in site.outputs)}
        ]
        excluded = self.lora.exclude_modules or ()
        wider: str | tuple[str, ...] = (*excluded, *idle)
        if isinstance(excluded, str):
            wider = "|".join([f"(?:{excluded})", *map(re.escape, idle)])
        lora = self.lora.model_copy(update={"exclude_modules": wider})
        return replace(self, lora=lora) if idle else self, idle

    def check(self, config: ModelConfig, where: str) -> None:
        """Refuse targets that match nothing in this model, and blocks that it does not have."""
        lora = self.lora
        lora.check_patterns(where)
        blocks = lora.layers_to_transform
        for number in (blocks,) if isinstance(blocks, int) else blocks or ():
            if not 0 <= number < config.num_hidden_layers:
                expected = f"blocks 0 to {config.num_hidden_layers - 1}"
                raise BadInput(where, "layers_to_transform", expected=expected, found=number)
        all_sites, stacks = linear_sites(self.base, config), expert_sites(self.base, config)
        ends = ", ".join(sorted({".".join(stack.name.split(".")[-3:]) for stack in stacks}))
        of_stacks = f"ends of names such as {ends}" if stacks else "none: no stack of experts takes adapters"
        of_linears = f"ends of names such as {leaves(all_sites)}"
        for key, among, expected in (
            ("target_parameters", stacks, of_stacks),
            ("target_modules", self.sites(config), of_linears),
            ("exclude_modules", all_sites, of_linears),
        ):
            names = getattr(lora, key)
            for name in names if isinstance(names, tuple) else ():
                if not _named(name, among):
                    todo = _LEFT_OUT if key == "target_modules" and _named(name, all_sites) else ""
                    raise BadInput(where, key, expected=expected, found=repr(name), todo=todo)

        targets = {site.name for site in self.sites(config)} | {stack.name for stack in self.stacks(config)}
        for key in ("rank_pattern", "alpha_pattern"):
            for pattern in getattr(lora, key):
                if not any(ends_with(name, pattern) for name in targets):
                    expected = "a pattern that the name of a layer with adapters ends with"
                    raise BadInput(where, key, expected=expected, found=repr(pattern))

    def check_peft(self, config: ModelConfig) -> None:
        """Refuse adapters that ``peft`` would attach to other modules. In a model with experts, PEFT
        (0.21) takes every module that has the name of an expert's module, such as
        shared_experts.gate_proj, for all experts.
        """
        owned = {module.rpartition(".")[2] for module in _experts(self, config)}
        for site in self.sites(config):
            if site.name.rpartition(".")[2] in owned:
                raise BadInput(
                    "lora", "target_modules", expected="modules that peft does not take for experts",
                    found=site.name, todo="`trilith merge-lora` adds such adapters to the weights",
                )  # fmt: skip

    def to_peft(self, config: ModelConfig, base_path: str | None) -> dict[str, object]:
        """Return the adapter_config.json of these adapters, so that ``peft`` attaches them to the same
        modules.
        """
        self.check_peft(config)
        shape = self.lora.to_peft()
        if self.lora.all_linear:  # spelled out: not every reader of such files knows the word
            shape["target_modules"] = leaves(self.sites(config)).split(", ")
        elif isinstance(self.lora.target_modules, str) and any(_experts(self, config)):
            # Beside experts PEFT (0.21) takes of what a pattern finds the last words, in every block.
            shape["target_modules"] = [site.name for site in self.sites(config)]
        turned = any(link.transpose for link in self.base.links(config)[0])
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_path,
            "bias": "none",
            "fan_in_fan_out": turned,
            "inference_mode": True,
            "init_lora_weights": True,
            **shape,
        }


def _named(name: str, among: Sequence[Site | ExpertSite]) -> bool:
    return any(site.name == name or site.name.endswith(f".{name}") for site in among)


def adapted(family: Family, lora: LoraConfig) -> AdaptedFamily:
    """Return the family with these adapters."""
    same = {field.name: getattr(family, field.name) for field in fields(Family)}
    return AdaptedFamily(**same, base=family, lora=lora)


def _check_no_experts(family: AdaptedFamily, config: ModelConfig) -> None:
    """Refuse targets that are experts, as files name them or as modules that hold them all."""
    for module in _experts(family, config):
        holder, _, leaf = module.rsplit(".", 2)
        for name in (module, holder, f"{holder}.{leaf}", f"{holder}.gate_up_proj"):
            if family.lora.targets(name):
                named: Any = family.lora.target_modules
                if not isinstance(named, str):
                    named = [ending for ending in named if f".{name}".endswith(f".{ending}")]
                expected = "linears: experts are stacks of matrices"
                expected += ", which target_parameters names" if expert_sites(family.base, config) else ""
                todo = r'Leave them out with exclude_modules = ".*\.experts(\..*)?", name other modules, or '
                todo += "say all-linear, which passes them over"
                actual = f"{literal(named)}, that is {name}"
                raise BadInput("lora", "target_modules", expected=expected, found=actual, todo=todo)


def _experts(family: AdaptedFamily, config: ModelConfig) -> Iterator[str]:
    """Yield every matrix of an expert, named as a module of Hugging Face's files; in transformers' own models
    it is a matrix that they stack.
    """
    (declared,) = family.base.declarations(config)
    for link in family.base.links(config)[0]:
        if declared[link.ours].experts or len(link.ours_box.shape) > len(link.hf_box.shape):
            yield link.hf.removesuffix(".weight")
