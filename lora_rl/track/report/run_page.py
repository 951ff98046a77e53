"""The report of one run."""

import math
import statistics
from collections.abc import Mapping, Sequence

from lora_rl.track import names
from lora_rl.track.format import duration, number
from lora_rl.track.recorder import nonfinite_names
from lora_rl.track.report import catalogue
from lora_rl.track.report.catalogue import Shown
from lora_rl.track.report.charts import Chart, Line, line_chart, share_bar, stacked_bars
from lora_rl.track.report.html import Node, h, page
from lora_rl.track.report.parts import (
    charts,
    describe_phase,
    metric_chart,
    phase_colour,
    phase_name,
    sample_groups,
    table,
    tile,
)
from lora_rl.track.report.run_folder import RECENT_STEPS, Run, outcome
from lora_rl.track.samples import compare

MAX_BARS = 120
LAG = "rollout/lag_"


def run_page(run: Run) -> str:
    """The whole page as HTML."""
    sections = [
        ("learning", "Learning", _learning(run)),
        ("samples", "Samples that improved or regressed", _samples(run)),
        ("engine", "Trainer against engine", _engine(run)),
        ("sync", "Weight synchronisation", _sync(run)),
        ("staleness", "Staleness", _staleness(run)),
        ("time", "Where the time goes", _time(run)),
        ("more", "All other metrics", _more(run)),
        ("environment", "Environment", _environment(run)),
        ("configuration", "Configuration", _configuration(run)),
    ]
    there = [(anchor, heading, body) for anchor, heading, body in sections if body is not None]
    links = h("nav", [h("a", heading, href=f"#{anchor}") for anchor, heading, _ in there])
    content = [h("section", h("h2", heading, id=anchor), body) for anchor, heading, body in there]
    return page(f"{run.name} - lora_rl", *_head(run), _tiles(run), links, *content, _foot(run))


def _head(run: Run) -> list[Node | None]:
    word, kind, problem = outcome(run)
    badge = h("span", word, class_=f"badge {kind}".strip())
    head = h("header", h("div", h("h1", run.name), badge, class_="top"), h("p", _subtitle(run), class_="lead"))
    boxes = [h("div", h("b", word[:1].upper() + word[1:]), h("span", problem), class_=f"box {kind}")] if problem else []
    bad = {name: record["step"] for record in reversed(run.records) for name in nonfinite_names(record)}
    if bad:
        named = ", ".join(f"{name} (first at step {step})" for name, step in sorted(bad.items()))
        text = f"They are gaps in the curves: {named}."
        boxes.append(h("div", h("b", "Some values were not finite"), h("span", text), class_="box warn"))
    return [head, *boxes]


def _subtitle(run: Run) -> str:
    config = run.config

    def size(key: str) -> int:
        return int(config.get(f"policy.megatron_cfg.{key}_model_parallel_size", "1"))

    kind = str(run.info.get("kind", "grpo")).upper()
    mode = ""
    if kind == "GRPO":
        mode = ", generating while training" if config.get("grpo.async_grpo.enabled") == "true" else ""
    parts = [kind + mode]
    if model := config.get("policy.model_name"):
        parts.append(f"model {model.rstrip('/').rpartition('/')[2]}")
    if dim := config.get("policy.megatron_cfg.peft.dim"):
        parts.append(f"adapters of rank {dim}")
    if precision := config.get("policy.precision"):
        parts.append(precision)
    if size("tensor") > 1 or size("pipeline") > 1:
        parts.append(f"TP {size('tensor')}, PP {size('pipeline')}")
    if started := run.info.get("started"):
        parts.append(f"started {started.replace('T', ' ').replace('+00:00', ' UTC')}")
    return " · ".join(parts)


def _tiles(run: Run) -> Node:
    tiles = []
    if accuracies := run.values(names.ACCURACY):
        step, best = run.best(names.ACCURACY)
        below = f"start {number(accuracies[0])}, best {number(best)} at step {step}"
        tiles.append(tile("held-out accuracy", number(accuracies[-1]), below=below))
    if losses := run.values(names.VAL_NLL):
        step, best = run.best(names.VAL_NLL, lowest=True)
        below = f"start {number(losses[0])}, best {number(best)} at step {step}"
        tiles.append(tile("held-out loss", number(losses[-1]), "nats per token", below))
    if rewards := run.values(names.REWARD):
        below = f"first {number(rewards[0])}; mean of the last {min(RECENT_STEPS, len(rewards))} steps"
        tiles.append(tile("reward", number(run.recent(names.REWARD)), below=below))
    if factors := run.values(names.TOKEN_MULT_PROB_ERROR):
        below = f"median; largest {max(factors):.4f}; 1 is exact"
        tiles.append(tile("token_mult_prob_error", f"{statistics.median(factors):.4f}", below=below))
    if errors := run.values(names.GEN_KL_ERROR):
        below = f"median, nats per token; largest {number(max(errors))}"
        tiles.append(tile("gen_kl_error", number(statistics.median(errors)), below=below))
    seconds = run.seconds()
    if seconds:
        pace = run.median(names.STEP_TIME)
        below = f"{len(run.trained)} steps" + (f", median {duration(pace)} each" if pace is not None else "")
        tiles.append(tile("time", duration(math.fsum(seconds.values())), below=below))
    rates = {phase: count / seconds[phase] for phase, count in run.tokens().items() if seconds.get(phase)}
    if rates:
        first = next(iter(sorted(rates, key=names.phase_order)))
        others = [f"{phase_name(p)} {number(r)}" for p, r in rates.items() if p != first]
        tiles.append(tile(f"{phase_name(first)}", number(rates[first]), "tokens/s", ", ".join(others)))
    return h("div", tiles, class_="tiles")


def _all(run: Run, section: Sequence[Shown]) -> list[Node | None]:
    return [metric_chart(run, shown) for shown in section]


def _block(*children: Node | str | None) -> Node | None:
    there = [child for child in children if child is not None]
    return h("div", *there) if any(not isinstance(child, str) for child in there) else None


def _learning(run: Run) -> Node | None:
    return _block(charts(_all(run, catalogue.RESULT), big=True), charts(_all(run, catalogue.LEARNING)))


def _samples(run: Run) -> Node | None:
    if run.validations is None:
        return None
    first, last = run.validations
    changes = compare(first, last)
    if not changes.total:
        return None
    share = {
        "improved": len(changes.improved),
        "regressed": len(changes.regressed),
        "right both times": len(changes.still_right),
        "wrong both times": len(changes.still_wrong),
    }
    temperature = run.config.get("grpo.val_temperature", "")
    chance = (
        ""
        if temperature in ("0", "0.0")
        else f" Answers are sampled at temperature {temperature or '1.0'}, so some changes are chance."
    )
    text = (
        f"Of {changes.total} held-out prompts, answered after step {first.step} and after step {last.step}: "
        + ", ".join(f"{count} {what}" for what, count in share.items())
        + f".{chance}"
    )
    headings = {
        "improved": "Improved",
        "regressed": "Regressed",
        "still_wrong": "Wrong both times",
        "still_right": "Right both times",
    }
    groups = sample_groups(changes, f"step {first.step}", f"step {last.step}", headings)
    return _block(h("p", text), *groups)


def _engine(run: Run) -> Node | None:
    body = charts(_all(run, catalogue.ENGINE))
    parity = run.values("sync/parity")
    text = (
        "The engine samples, the trainer computes the probabilities of what was sampled anew. With the same weights "
        "on both sides the two differ by rounding only; with older rollouts also by the steps in between."
    )
    if parity:
        text += (
            f" On probe sequences both logprobs differed by {number(parity[0])} nats on average after the first push."
        )
    return _block(h("p", text), body) if body is not None else None


def _sync(run: Run) -> Node | None:
    pushes, sizes = run.series("sync/version")[1], run.values("sync/bytes")
    if not pushes:
        return None
    mode = run.config.get("policy.generation.weight_sync.mode")
    text = f"{pushes[-1]:.0f} versions of the weights were pushed" + (f" (mode {mode})" if mode else "")
    if sizes:
        text += f", {number(sizes[-1] / 2**20)} MiB each"
    return _block(
        h("p", text + ". Every one was echoed by the engines with its checksums."), charts(_all(run, catalogue.SYNC))
    )


def _staleness(run: Run) -> Node | None:
    if not run.values(names.AGE):
        if not run.values(names.REWARD):
            return None
        return h("p", "None: rollouts were generated between the steps, with the weights that were then trained on.")
    shares = [name for name in _recorded(run) if name.startswith(LAG) and any(run.values(name))]
    lines = [
        Line(f"{name.removeprefix(LAG).split('_')[0]} versions", *run.series(name), colour=n)
        for n, name in enumerate(shares)
    ]
    ages = [Line("mean", *run.series(names.AGE)), Line("oldest", *run.series(names.OLDEST), colour=1)]
    note = "0: sampled with the weights that are trained on."
    age = line_chart(Chart("Age of the rollouts", "weight versions", ages, note, zero=True))
    by_age = line_chart(Chart("Tokens by age", "share", lines, zero=True)) if len(lines) > 1 else None
    return charts([age, by_age, *_all(run, catalogue.STALENESS)])


def _time(run: Run) -> Node | None:
    trained = [record for record in run.trained if names.STEP_TIME in record]
    seconds = {phase: spent for phase, spent in run.seconds().items() if spent > 0}
    if not seconds:
        return None
    whole, tokens = math.fsum(seconds.values()), run.tokens()
    rows = [
        (
            h("td", h("i", class_=f"key fill p{phase_colour(phase)}"), phase_name(phase)),
            duration(spent),
            f"{spent / whole:.1%}",
            number(tokens[phase] / spent) if phase in tokens else "",
        )
        for phase, spent in seconds.items()
    ]
    rows.append((h("td", h("b", "all")), duration(whole), "100 %", ""))
    bars = None
    if trained:
        width = math.ceil(len(trained) / MAX_BARS)
        bins = [trained[n : n + width] for n in range(0, len(trained), width)]
        phases = [phase for phase in seconds if any(names.TIME + phase in record for record in trained)]
        layers = {
            phase_name(phase): [math.fsum(r.get(names.TIME + phase, 0.0) for r in part) / len(part) for part in bins]
            for phase in phases
        }
        centres = [statistics.fmean(record["step"] for record in part) for part in bins]
        note = f"Each bar is the mean of {width} steps." if width > 1 else ""
        by_name = {phase_name(phase): phase_colour(phase) for phase in phases}
        bars = stacked_bars("Time per step", "seconds", centres, layers, width, by_name.__getitem__, note)
    return _block(
        h("div", bars, class_="charts") if bars is not None else None,
        share_bar(seconds, phase_colour, describe_phase),
        table(("phase", "time", "share", "tokens/s"), rows, numeric=(1, 2, 3)),
    )


def _more(run: Run) -> Node | None:
    """Whatever was recorded and is not shown above, folded; metrics that never changed as a table."""
    shown = set(catalogue.EXPLAINED)
    rest = [n for n in _recorded(run) if n not in shown and not n.startswith((*catalogue.ELSEWHERE, LAG))]
    rest += [name for name in _recorded(run) if name.startswith("model/")]
    changing: dict[str, list[Shown]] = {}
    fixed: list[tuple[str, str]] = []
    for name in sorted(rest):
        values = run.values(name)
        if len(set(values)) > 1:
            changing.setdefault(name.partition("/")[0], []).append(Shown(name, name))
        elif values:
            fixed.append((name, number(values[0])))
    folds = [
        h("details", h("summary", group, h("span", f" {len(members)}")), charts(_all(run, members)))
        for group, members in changing.items()
    ]
    if fixed:
        cells = [(h("td", name, class_="key-name"), value) for name, value in fixed]
        folds.append(
            h(
                "details",
                h("summary", "never changed", h("span", f" {len(fixed)}")),
                table(("metric", "value"), cells, (1,)),
            )
        )
    return h("div", folds) if folds else None


def _environment(run: Run) -> Node | None:
    facts: Mapping[str, str] = run.info.get("environment", {})
    if not facts:
        return None
    rows = [(name, str(value)) for name, value in facts.items()]
    rows.append(("command", h("td", str(run.info.get("command", "")), class_="key-name")))
    return table(("", ""), rows)


def _configuration(run: Run) -> Node | None:
    if not run.config_text:
        return None
    count = f" config.yaml, {len(run.config)} keys"
    return h("details", h("summary", "Every key", h("span", count)), h("pre", run.config_text, class_="file"))


def _foot(run: Run) -> Node:
    return h(
        "footer",
        f"Made from {run.folder}. `lora-rl report` makes this page again, `lora-rl compare` sets runs side by side.",
    )


def _recorded(run: Run) -> list[str]:
    return list(dict.fromkeys(name for record in run.records for name in record if "/" in name))
