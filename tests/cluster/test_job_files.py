"""Write a job's file for each system with ``trilith launch``, and refuse jobs that cannot be."""

import inspect
import os
import re
import subprocess
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.command_lines import call_command
from support.draws import drawn
from support.pages import Page
from support.refusals import Refused, refusals
from trilith.cli.app import run
from trilith.cli.launch import launch as launch_command
from trilith.cluster import SYSTEMS, job_of, render
from trilith.parallel_state import BadInput
from trilith.recipes.recipe import load_recipe

RECIPE = "llama-3.1-70b-64gpus"


def written(folder, *words):
    out = folder / "job"
    assert run(["launch", *words, "--out", str(out), "--force"]) == 0
    return out.read_text()


def loaded(folder, *words):
    return yaml.safe_load(written(folder, *words))


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_file_says_the_layout_s_ranks_and_how_it_is_started(system, tmp_path):
    text = written(tmp_path, system, RECIPE, "--nodes", "16")
    assert "on 16 nodes of 4 ranks" in text
    assert f"trilith train {RECIPE}" in text or RECIPE in yaml.safe_load(text)["spec"].__repr__()


def test_a_slurm_script_is_a_script_of_bash_and_holds_what_was_asked(tmp_path):
    options = ["--partition", "gpu", "--account", "lab", "--exclude", "n7", "--exclude", "n9"]
    limits = ["--minutes", "90", "--warning", "10", "--restarts", "2"]
    text = written(tmp_path, "slurm", RECIPE, "optimizer.lr=1e-4", *options, *limits)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    directives = [line.split("#SBATCH ")[1].split()[0] for line in text.splitlines() if "#SBATCH " in line]
    wanted = {"--nodes=8", "--gpus-per-node=8", "--time=01:30:00", "--signal=B:USR1@600", "--requeue"}
    wanted |= {"--partition=gpu", "--account=lab", "--exclude=n7,n9", "--ntasks-per-node=1"}
    assert wanted <= set(directives)
    assert f"trilith train {RECIPE} optimizer.lr=1e-4" in text and '"$restart" -lt 2' in text
    needed = "--kill-on-bad-exit=1 --dependency=singleton excluded-nodes FI_PROVIDER NCCL_DEBUG=WARN "
    needed += "NCCL_IB_HCA NCCL_SOCKET_IFNAME TORCH_FR_BUFFER_SIZE TORCH_NCCL_DUMP_ON_TIMEOUT"
    assert [word for word in [*needed.split(), "hostname --all-ip-addresses"] if word not in text] == []
    assert text.index("#SBATCH --exclude") < text.index("set -u"), "Slurm reads no directive after a command"


def test_kubeflow_s_plugin_starts_torchrun_with_the_numbers_of_the_job(tmp_path):
    job = loaded(tmp_path, "kubernetes", RECIPE, "--image", "here/trilith:1", "--name", "Llama_70B")
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], trainer["image"]) == (8, 8, "here/trilith:1")
    assert trainer["command"][:2] == ["torchrun", "--no-python"]
    assert job["metadata"]["name"] == "llama-70b"


def test_the_pods_of_a_job_set_meet_at_the_first(tmp_path):
    job = loaded(tmp_path, "jobset", RECIPE, "--name", "big")
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["completionMode"]) == (8, 8, "Indexed")
    container = spec["template"]["spec"]["containers"][0]
    assert "--rdzv-endpoint=big-node-0-0.big:29400" in container["command"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    volumes = spec["template"]["spec"]["volumes"]
    assert {volume["name"] for volume in volumes} == {mount["name"] for mount in container["volumeMounts"]}


def pod_of(job):
    """Return the part of the object that Kubernetes makes pods of, and the command that they run."""
    if job["kind"] == "JobSet":
        pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
        return pod, pod["containers"][0]["command"]
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return node["template"]["spec"]["template"]["spec"], job["spec"]["trainer"]["command"]


def expanded(words):
    """Return a pod's words as its container gets them: Kubernetes replaces $(NAME), and takes $$ for a $."""
    return ["$".join(re.sub(r"\$\(\w+\)", "value", part) for part in word.split("$$")) for word in words]


def on_the_claim(job):
    """Return a run's folder as its pods know it, and where that lies on the volume of the claim."""
    pod, command = pod_of(job)
    _, file, *overrides = expanded(command[command.index("trilith") + 1 :])
    folder = Path(load_recipe(file, overrides).out)
    (mount,) = [
        mount
        for mount in pod["containers"][0]["volumeMounts"]
        if folder.is_relative_to(mount["mountPath"]) and ".." not in folder.parts
    ]
    (volume,) = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
    assert volume["persistentVolumeClaim"] == {"claimName": "store"}
    inside = Path(mount.get("subPath", ""))
    assert not inside.is_absolute() and ".." not in inside.parts, "Kubernetes takes no other"
    return folder, inside / folder.relative_to(mount["mountPath"])


@pytest.mark.parametrize("system", ["kubernetes", "jobset"])
def test_each_run_has_a_folder_of_its_own_on_a_claim_so_that_a_new_pod_goes_on(system, tmp_path):
    outs = ["/data/run1", "/data/run2", "/run1", "run1", "runs/a", ".", "/a/../b", "//c", "a b$(HOME)/'c'"]
    jobs = [loaded(tmp_path, system, RECIPE, f"out={out}", "--claim", "store") for out in outs]
    places = dict(zip(outs, map(on_the_claim, jobs), strict=True))
    assert len({inside for _, inside in places.values()}) == len(outs)
    for out, (folder, inside) in places.items():
        assert str(folder) == f"/{inside}"
        assert not out.startswith("/") or folder == Path(os.path.normpath(f"//{out}")), out


def test_limits_and_bad_hosts_are_written_as_kubernetes_knows_them(tmp_path):
    words = [RECIPE, "--minutes", "90", "--warning", "10", "--exclude", "n7", "--exclude", "n9"]
    unlike = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["n7", "n9"]}
    for system in ("kubernetes", "jobset"):
        job = loaded(tmp_path, system, *words)
        pod, _ = pod_of(job)
        (term,) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"].values()
        assert term == [{"matchExpressions": [unlike]}]
        assert pod["terminationGracePeriodSeconds"] == 600
        spec = job["spec"] if system == "kubernetes" else job["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert spec["activeDeadlineSeconds"] == 80 * 60, "the run has its ten minutes from then on"
        assert "activeDeadlineSeconds" not in written(tmp_path, system, RECIPE)


#: Each option of a job, as a user gives it, with those that it needs beside it.
OPTIONS = {
    "minutes": ["--minutes", "77"],
    "warning": ["--warning", "7"],
    "restarts": ["--restarts", "41"],
    "partition": ["--partition", "gpu"],
    "account": ["--account", "lab"],
    "exclude": ["--exclude", "n7"],
    "spares": ["--spares", "1"],
    "fit": ["--fit"],
    "least_nodes": ["--least-nodes", "3", "--fit"],
    "image": ["--image", "here/it:1"],
    "claim": ["--claim", "store"],
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_option_stands_in_the_file_or_is_refused_by_its_name(system, tmp_path, capsys):
    others = {"system", "recipe", "overrides", "nodes", "ranks_per_node", "name", "out", "submit", "force"}
    assert OPTIONS.keys() == inspect.signature(launch_command).parameters.keys() - others
    for option, words in OPTIONS.items():
        without = written(tmp_path, system, RECIPE, *words[2:])
        code = run(["launch", system, RECIPE, *words, "--out", str(tmp_path / "job"), "--force"])
        if option in SYSTEMS[system].options:
            assert code == 0 and (tmp_path / "job").read_text() != without, option
        else:
            assert code == 2 and (tmp_path / "job").read_text() == without, option
            told = capsys.readouterr().err
            assert re.search(rf"error: launch: {words[0]}: expected (slurm|.*jobset), found {system}\n", told)
        capsys.readouterr()


#: Text that would end the place where it stands, or mean something else there, and text at random.
harmful = st.sampled_from(
    [*"\n\r\0\t\x1b\x85\u2028\u202e\xa0", *"'\"\\#$`&|;<>*?!~%@:,-= ", "$(echo >x)", "${HOME}", " # ",
     "{{out}}", "$$", "1e3", "yes", "null", "é", "n1"]
)  # fmt: skip
texts = st.lists(st.one_of(harmful, st.characters()), max_size=4).map("".join)
#: Options that may be no more than a name.
LIMITED = ("partition", "account", "exclude", "image", "claim")
#: How a user knows what is no option.
KNOWN = {"recipe": "RECIPE", "override": "KEY=VALUE", "file": "--out", "out": "out"}
#: Stand-ins for the commands of a script that is run here: it touches nothing, and srun writes its words.
STUBS = """
mkdir() { :; }
touch() { :; }
grep() { cat; }
scontrol() { echo n1; }
hostname() { echo 10.0.0.1; }
trilith() { return 0; }
srun() { if [ "$1" = --nodes=1 ] && [ "$2" = --ntasks=1 ] && [ "$4" = hostname ]; then hostname; else
    while [ "$1" != launcher ]; do shift; done; printf '%s\\0' "$out" "${@:2}" > words; fi; }
SLURM_JOB_NODELIST=n1 SLURM_JOB_ID=1
"""


def file_of(system, recipe, text, what):
    """Return the file of a job in which one value is the text, and the words that each rank is to run."""
    file = text if what == "recipe" else "r.toml"
    overrides = [f"run_name={text if what == 'override' else 'a'}"]
    options = {what: (text,) if what == "exclude" else text} if what in OPTIONS else {}
    recipe = recipe.model_copy(update={"out": text} if what == "out" else {})
    job = job_of(recipe, file, overrides, system, name="a", **options)
    return render(job, text if what == "file" else "job"), job


@pytest.mark.parametrize(
    ("system", "what"),
    [
        *(("slurm", what) for what in ("recipe", "override", "out", "file", *LIMITED[:3])),
        *(("jobset", what) for what in ("recipe", "override", "out", "file", "image", "claim", "exclude")),
        *(("kubernetes", what) for what in ("recipe", "override", "out", "image", "claim")),
    ],
)
def test_what_a_user_gives_is_the_same_in_the_file_or_is_refused(system, what, tmp_path):
    recipe = load_recipe("llama-3.2-1b-1gpu")
    plain, _ = file_of(system, recipe, "n1", what)

    @settings(max_examples=drawn(25), deadline=None)
    @given(text=texts)
    @example(text="n1\ntouch x")
    @example(text="$(HOME) $$")
    @example(text="-x")
    def check(text):
        try:
            file, job = file_of(system, recipe, text, what)
        except BadInput as error:
            assert str(error).isprintable()
            assert str(error).startswith(f"launch: {KNOWN.get(what, f'--{what}')}: ")
            limited = what in LIMITED or (what == "out" and system != "slurm")
            is_name = text.isascii() and text.isalnum()
            assert not is_name and (limited or not text or not text.isprintable())
            return
        assert len(file.splitlines()) == len(plain.splitlines())
        assert not job.out.startswith("-") and not job.recipe.startswith("-"), "it would be an option"
        path = {"out": job.out, "recipe": job.recipe}.get(what, text)
        assert Path(path) == Path(text)
        if what in ("partition", "account") or (what, system) == ("exclude", "slurm"):
            assert f"#SBATCH --{what}={text}" in file.splitlines() and not set(text) & set(" '\"#\\")
        elif system == "slurm":
            subprocess.run(["bash", "-c", STUBS + file], cwd=tmp_path, check=True, timeout=20)
            heard = (tmp_path / "words").read_bytes().decode().split("\0")[:-1]
            assert heard == [job.out, *job.words]
            assert not (tmp_path / "x").exists()
        else:
            _, command = pod_of(yaml.safe_load(file))
            words = expanded(command[command.index("trilith") :])
            assert words[: len(job.words)] == job.words and len(words) <= len(job.words) + 1
            stated = {"image": job.image, "claimName": "a-run" if job.claim is None else job.claim}
            for key, value in stated.items():
                assert values_of(yaml.safe_load(file), key) == {value}

    check()


def values_of(tree, key):
    """Return the values that stand under a key anywhere in a tree of dicts and lists."""
    if isinstance(tree, list):
        return set().union(*(values_of(branch, key) for branch in tree))
    if not isinstance(tree, dict):
        return set()
    below = set().union(*(values_of(branch, key) for branch in tree.values()))
    return below | ({tree[key]} if key in tree else set())


#: Options that add keys.
MORE = ["--minutes", "90", "--exclude", "n7"]


def lacks(there, mine, at=""):
    """Return the places at which ``there`` does not say what ``mine`` says; it may say more."""
    if isinstance(mine, dict):
        pairs = [(key, there.get(key) if isinstance(there, dict) else None) for key in mine]
        return [one for key, value in pairs for one in lacks(value, mine[key], f"{at}.{key}")]
    if isinstance(mine, list):
        if not isinstance(there, list) or len(there) != len(mine):
            return [at]
        return [one for n, value in enumerate(mine) for one in lacks(there[n], value, f"{at}[{n}]")]
    return [] if there == mine else [at]


@pytest.mark.parametrize(
    ("system", "module", "kind"),
    [
        ("kubernetes", "trainer_v1alpha1_train_job", "TrainerV1alpha1TrainJob"),
        ("jobset", "jobset_v1alpha2_job_set", "JobsetV1alpha2JobSet"),
    ],
)
@pytest.mark.parametrize("words", [[RECIPE, *MORE], ["llama-3.2-1b-1gpu"]])
def test_the_published_schemas_of_kubernetes_objects_know_each_key_and_accept_each_value(
    system, module, kind, words, tmp_path
):
    """The models are generated from the schemas; they drop keys that a schema has not."""
    name = f"kubeflow_trainer_api.models.{module}"
    models = pytest.importorskip(name, reason="comes with the extra trilith[test]: kubeflow-trainer-api")
    model, job = getattr(models, kind), loaded(tmp_path, system, *words)
    assert lacks(model.from_dict(job).to_dict(), job) == []
    job["spec"]["retries"] = 3
    assert lacks(model.from_dict(job).to_dict(), job) == [".spec.retries"], "an unknown key must be seen"
    form = ".".join(version("kubeflow-trainer-api").split(".")[:2])
    stated = {"kubernetes": f"Kubeflow Trainer {form}.", "jobset": "JobSet 0.12."}[system]
    assert f"# Written in the form of {stated} " in written(tmp_path, system, *words)


def launch(why, says, *words, system="slurm", before=lambda folder: None):
    def call(folder):
        call_command(folder, "launch", system, RECIPE, *words, "--out", "job")

    return Refused(why, call, says, given=before)


test_jobs_that_cannot_be_are_refused = refusals(
    launch("least-nodes", "--least-nodes: expected --fit with it, found 2", "--least-nodes", "2"),
    launch("too-many", "--least-nodes: expected at most 8, .* 9", "--fit", "--least-nodes", "9"),
    launch(
        "ranks",
        "numbers whose product is 64, .*found 7 x 10. Nearest legal --nodes: 4 or 8",
        "--nodes",
        "7",
    ),
    launch("ranks-of-4", "product is 64, .*found 4 x 8", "--nodes", "4", "--ranks-per-node", "8"),
    launch("limit", "--warning: expected fewer minutes than the limit of 5, found 5", "--minutes", "5"),
    launch("name", "--name: expected letters, digits, - _ and ., found 'a b'", "--name", "a b"),
    launch("layout", "layout: tensor: expected a divisor of num_attention_heads=64", "layout.tensor=48"),
    launch("host", "--exclude: expected one node's name.*'n.1-", "--exclude", "n[1-3]", system="jobset"),
    launch("claims", "--claim: expected one claim's name.*'a b'", "--claim", "a b", system="jobset"),
    launch("image", "--image: expected one image's name.*' '", "--image", " ", system="kubernetes"),
    launch("colon", "out: expected a path without :", "out=a:b", system="kubernetes"),
    launch("above", "out: expected a path .* not above", "out=../a", system="jobset"),
    *(
        launch(f"hides {out}", f"launch: out: expected a folder .*'{out}'", f"out={out}", system="jobset")
        for out in ("/", "/usr", "/dev", "/dev/shm/a", "/proc/1", "/sys", "/bin", "/etc/a", "/lib/a", "/var")
    ),
    launch("somebody-adapted-it", "job", before=lambda folder: (folder / "job").write_text("mine")),
)


def test_a_job_that_may_shrink_asks_for_a_range_of_nodes(tmp_path):
    text = written(tmp_path, "slurm", RECIPE, "--fit", "--least-nodes", "4", "--spares", "2")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert "#SBATCH --nodes=4-10\n" in text and 'if [ "$count" -lt 4 ]' in text and "| head -n 8)" in text
    assert f"trilith train {RECIPE} --fit" in text
    # With it, Slurm would give the job the fewest nodes of the range.
    assert "#SBATCH --ntasks-per-node" not in text
    fixed = written(tmp_path, "slurm", RECIPE, "--spares", "2")
    assert "#SBATCH --nodes=10\n" in fixed and 'if [ "$count" -lt 8 ]' in fixed and "--fit" not in fixed


#: Commands as a run sees them: srun trains until it is asked to stop; Slurm sends its signal and is told to
#: requeue; what the run ended with is ENDED.
RUN = """
scontrol() { [ "$1" = requeue ] && echo "requeued $2" || echo n1; }
srun() { [ "$4" = hostname ] && { echo 10.0.0.1; return; }
    kill -USR1 $$; for _ in {1..500}; do [ -e "$out/stop" ] && return; sleep 0.01; done; }
trilith() { echo "trilith $*"; return $ENDED; }
SLURM_JOB_NODELIST=n1 SLURM_JOB_ID=5
"""


@pytest.mark.parametrize(
    ("ended", "restarts", "code"),
    [(0, 0, 0), (75, 9, None), (2, 0, 2), (4, 0, 4), (1, 1, None), (1, 2, 1)],
    ids=["finished", "saved", "bad-input", "damaged", "failed-the-second-time", "failed-the-third-time"],
)
def test_a_slurm_script_stops_the_run_at_the_signal_and_requeues_what_can_go_on(
    ended, restarts, code, tmp_path
):
    """``test_slurm.py`` runs such a script on a real Slurm. ``code``: ``None`` for a job that is requeued."""
    out = tmp_path / "run"
    script = RUN + written(tmp_path, "slurm", RECIPE, f"out={out}", "--nodes", "1", "--restarts", "2")
    environment = os.environ | {"ENDED": str(ended), "SLURM_RESTART_COUNT": str(restarts)}
    job = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=20)
    assert job.stdout.splitlines()[0] == f"trilith status {out} --since {out}/job-started --exit-code"
    assert job.stdout.splitlines()[1:] == (["requeued 5"] if code is None else []), job.stderr
    assert job.returncode == (code or 0)
    assert (out / "stop").exists()


def commands(first):
    return [words for words in Page.read("docs/clusters.md").commands() if words[0] == first]


def test_the_page_s_commands_write_jobs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert len(commands("launch")) == 5
    for words in commands("launch"):
        assert run([*words, "--force"]) == 0, words
    spared = (tmp_path / "llama-3.1-8b-8gpus.sbatch").read_text()
    assert "#SBATCH --nodes=3\n" in spared and "layout.data=16" in spared


@pytest.mark.slow
def test_the_page_s_models_fit_their_gpus(capsys):
    assert len(commands("train")) == 2
    for words in commands("train"):
        assert run(words) == 0, words


def test_a_job_is_not_submitted_where_there_is_no_scheduler(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    out = tmp_path / "job"
    assert run(["launch", "slurm", RECIPE, "--out", str(out), "--submit"]) == 2
    assert "expected the program sbatch on this machine" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("system", "program", "words"),
    [
        ("slurm", "sbatch", ""),
        ("kubernetes", "kubectl", "apply -f "),
        ("jobset", "kubectl", "apply -f "),
    ],
)
@pytest.mark.parametrize("code", [0, 7])
def test_the_written_file_is_handed_to_the_scheduler_whose_refusal_is_told(
    system, program, words, code, tmp_path, monkeypatch, capfd
):
    scheduler = tmp_path / program
    scheduler.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\ntest -s "{tmp_path}/job" && exit {code}\n')
    scheduler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    out = tmp_path / "job"
    assert run(["launch", system, RECIPE, "--out", str(out), "--submit"]) == (2 if code else 0)
    assert (tmp_path / "said").read_text() == f"{words}{out}\n"
    told = f"error: launch: --submit: expected {program} to take the file, found exit code 7\n"
    assert capfd.readouterr().err == (told if code else "")


@pytest.mark.parametrize("words", [["--out=-x"], ["--name=-x"]])
def test_a_path_that_begins_with_a_hyphen_is_no_option_of_the_scheduler(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["launch", "slurm", RECIPE, *words]) == 0
    (file,) = tmp_path.iterdir()
    assert capsys.readouterr().out.endswith(f"next: sbatch ./{file.name}\n")
    assert f"Submit it with: sbatch ./{file.name}\n" in file.read_text()
