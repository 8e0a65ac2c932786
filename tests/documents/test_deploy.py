"""The files in deploy/ can be read, and start the server that there is, without privileges."""

import configparser
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import typer
import yaml

from outdraft.cli.app import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CONTAINERS = sorted(DEPLOY.glob("Containerfile.*"))
MANIFESTS = list(yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text()))


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str
    parser.read_string((DEPLOY / "outdraft.service").read_text())
    return parser


def check_serve(words: list[str]) -> None:
    """Raise AssertionError if a command line of `outdraft serve` has an unknown flag."""
    assert words[0].rpartition("/")[2] == "outdraft"
    assert words[1] == "serve"
    command = typer.main.get_command(app).commands["serve"]
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known


def pods() -> list[dict]:
    cluster = MANIFESTS[0]["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_the_unit_starts_the_server_without_privileges():
    service = unit()["Service"]
    check_serve(shlex.split(service["ExecStart"]))
    assert service["DynamicUser"] == "yes"
    assert (service["ProtectSystem"], service["NoNewPrivileges"]) == ("strict", "yes")
    assert service["RestartPreventExitStatus"] == "2"  # as a ConfigError ends it
    drain_s = int(re.search(r"--drain-timeout (\d+)", service["ExecStart"])[1])
    assert int(service["TimeoutStopSec"]) > drain_s


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_the_unit(tmp_path):
    text = (DEPLOY / "outdraft.service").read_text()
    program = shutil.which("true")
    path = tmp_path / "outdraft.service"
    path.write_text(text.replace("/opt/outdraft/bin/outdraft", program))
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True
    )
    about = [line for line in checked.stderr.splitlines() if "outdraft.service" in line]
    assert about == []


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.name)
def test_a_container_ends_as_an_unprivileged_user_who_serves(path):
    steps = [
        line.split(maxsplit=1)
        for line in path.read_text().replace("\\\n", "").splitlines()
        if line and not line.startswith("#")
    ]
    last = dict(steps)
    assert last["USER"] == "10001:10001"
    assert yaml.safe_load(last["VOLUME"]) == ["/cache", "/tmp"]
    assert "HOME=/cache" in last["ENV"].split()
    check_serve([*yaml.safe_load(last["ENTRYPOINT"]), *yaml.safe_load(last["CMD"])])
    assert [name for name, _ in steps].index("COPY") > [name for name, _ in steps].index("WORKDIR")


@pytest.mark.parametrize("path", CONTAINERS, ids=lambda path: path.name)
def test_a_login_shell_finds_the_programs_that_kuberay_starts(path):
    """Debian's /etc/profile sets PATH anew: to /usr/local/bin, but not to the environment."""
    [links] = re.findall(r"^RUN ln -s (.+) /usr/local/bin/$", path.read_text(), re.MULTILINE)
    assert links.split() == ["/opt/outdraft/bin/outdraft", "/opt/outdraft/bin/ray"]


def test_there_are_containers_for_cpus_and_gpus():
    assert [path.name for path in CONTAINERS] == ["Containerfile.cpu", "Containerfile.cuda"]


def test_the_job_starts_replicas_that_the_workers_have_room_for():
    job, _ = MANIFESTS
    words = shlex.split(job["spec"]["entrypoint"])
    check_serve(words)
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    [workers] = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert workers["replicas"] == int(flags["--data-parallel-size"])
    assert workers["maxReplicas"] == int(flags["--max-replicas"])
    [container] = workers["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == flags["--replica-cpus"]


@pytest.mark.parametrize("pod", pods(), ids=["head", "workers"])
def test_pods_run_as_an_unprivileged_user_on_a_read_only_root(pod):
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == 10001
    [container] = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not container["securityContext"]["allowPrivilegeEscalation"]
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/cache", "/tmp", "/dev/shm"} == set(mounted.values())
    assert mounted.keys() == {volume["name"] for volume in pod["volumes"]}


def test_the_service_leads_to_the_head():
    job, service = MANIFESTS
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]
    assert service["spec"]["selector"] == head["metadata"]["labels"]
    [port] = service["spec"]["ports"]
    [container] = head["spec"]["containers"]
    named = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert str(named[port["targetPort"]]) in shlex.split(job["spec"]["entrypoint"])


def test_ray_is_the_version_that_the_tests_run_with():
    [pin] = re.findall(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert MANIFESTS[0]["spec"]["rayClusterSpec"]["rayVersion"] == pin
