"""Plans that cannot be are refused, and nothing is written."""

from support.commands import call_command
from support.refusals import Refused, refusals
from trilith.planner.time import machine_named
from trilith.search import read_request


def inputs(folder):
    (folder / "empty").mkdir()
    (folder / "taken.toml").touch()
    (folder / "bench.json").write_text("{}")
    (folder / "unknown.json").write_text('{"model_type": "unknown"}')


def plan(why, says, *words, gpus="2", model="llama-3.2-1b"):
    words = ["plan", model, *(["--gpus", gpus] if gpus else []), *words]
    return Refused(why, lambda folder: call_command(folder, *words), says, given=inputs)


SMALL = ("--seq", "512", "--global-batch", "4")

test_plans_that_cannot_be_are_refused = refusals([
    plan("dtype", "--dtype", "--dtype", "float32"),
    plan("price-without-tokens", "--tokens", "--price", "2"),
    plan("watts-without-tokens", "--tokens", "--watts", "500"),
    plan("tokens", "--tokens", "--tokens", "0.5"),
    plan("two-outputs-in-one-file", "--html", "--write", "one.toml", "--html", "./one.toml"),
    plan("no-folder-for-the-page", "nowhere", "--html", "nowhere/page.html"),
    plan("taken", "taken.toml", "--write", "taken.toml"),
    plan("folder-without-config", "config.json", model="empty"),
    plan("unknown-model-type", "model_type", model="unknown.json"),
    plan("no-such-size", "llama-3.1-405b", model="llama-3.1-405"),
    plan("no-gpus", "--gpus", gpus=None),
    plan("no-such-gpu", "h100-80gb", "--gpu", "h1000"),
    plan("no-layout-for-the-number", "--gpus", "--global-batch", "8", "--seq", "64", gpus="17"),
    plan("no-layout-for-any-number", "plan llama-3.2-1b: --gpus", *SMALL, gpus="17,19"),
    plan("recipe-of-several-plans", "--write", *SMALL, "--write", "recipe.toml", gpus="1,2"),
    plan("recipe-of-generation", "--write", "--generate", "--write", "recipe.toml"),
    plan("bench-of-nothing", "bench.json", "--machine", "bench.json"),
    plan("rows-that-do-not-fit", "Take more --gpus",
         *("--gpu", "l40s", "--seq", "2048", "--generate", "--headroom", "0.9", "--dtype", "float32")),
    plan("model-that-does-not-fit", "of 3.6 GB.*What would fit: --gpu",
         *("--gpu", "rtx-4090", "--seq", "1024", "--global-batch", "4", "--headroom", "0.85"), gpus="1",
         model="llama-3.1-8b"),
    Refused("no-such-model", lambda _: read_request("no-such", machine_named("l40s"), 4), "published size"),
])  # fmt: skip
