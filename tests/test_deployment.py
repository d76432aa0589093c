"""What docker-compose.yml and the Dockerfile promise, as far as it can be seen without an engine.

With an engine everything is run for real: tests/compose.sh (make test-compose).
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text()
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
GPU = yaml.safe_load((ROOT / "docker-compose.gpu.yml").read_text())
SERVICES = COMPOSE["services"]
NODES = ("ray-head", "ray-worker", "study")
SECRET = re.compile(r"PASSWORD|TOKEN$|SECRET|KEY")
# ${NAME}, ${NAME-default} or ${NAME:-default}
VARIABLE = re.compile(r"(?<!\$)\$\{(\w+)(?::?-([^}]*))?\}")


def default(text):
    """A value as compose sees it without any setting."""
    return VARIABLE.sub(lambda found: found[2] or "", str(text))


def stage(name):
    """The instructions of one stage of the Dockerfile."""
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)
    return next(text for text in stages if text.splitlines()[0].endswith(f" AS {name}"))


def megabytes(text):
    number, unit = re.fullmatch(r"(\d+)([mg])", default(text)).groups()
    return int(number) * {"m": 1, "g": 1024}[unit]


def test_the_system_has_its_five_parts():
    assert set(SERVICES) == {"postgres", "ray-head", "ray-worker", "study", "service"}


def test_every_port_is_on_loopback_and_only_two_are_open():
    ports = {name: [default(port) for port in one.get("ports", [])] for name, one in SERVICES.items()}
    assert {name: found for name, found in ports.items() if found} == {
        "ray-head": ["127.0.0.1:8265:8265"],
        "service": ["127.0.0.1:8000:8000"],
    }


@pytest.mark.parametrize("name", SERVICES)
def test_a_container_can_neither_write_its_image_nor_gain_rights(name):
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert service["tmpfs"]
    assert megabytes(service["mem_limit"]) > 0


@pytest.mark.parametrize("name", SERVICES)
def test_no_container_is_root(name):
    if "build" not in SERVICES[name]:
        assert SERVICES[name]["user"] not in ("root", "0")
        return
    last = re.findall(r"^USER (\S+)", stage(SERVICES[name]["build"]["target"]), flags=re.MULTILINE)[-1]
    assert "user" not in SERVICES[name] and last == "gradnorm"
    assert re.search(r"useradd .*--uid [1-9]\d* .* gradnorm( \\)?$", stage("base"), flags=re.MULTILINE)


def test_whoever_stays_up_says_whether_it_is_well():
    for name, service in SERVICES.items():
        if service["restart"] == "no":
            continue
        assert "healthcheck" in service or "HEALTHCHECK --" in stage(service["build"]["target"]), name


def test_whoever_needs_another_waits_until_that_one_is_well():
    waits = {name: set(service.get("depends_on", {})) for name, service in SERVICES.items()}
    assert waits["study"] == {"postgres", "ray-head", "ray-worker"}
    assert waits["ray-worker"] == {"ray-head"} and waits["service"] == {"postgres"}
    for service in SERVICES.values():
        for condition in service.get("depends_on", {}).values():
            assert condition == {"condition": "service_healthy"}


def test_a_worker_can_be_scaled():
    worker = SERVICES["ray-worker"]
    assert "container_name" not in worker and "ports" not in worker and "hostname" not in worker


def test_no_default_secret_reaches_a_network():
    with_default = {}
    for name, service in SERVICES.items():
        for key, value in service["environment"].items():
            if SECRET.search(key) and default(value if value is not None else ""):
                with_default.setdefault(key, set()).add(name)
    # The database's password: it has no port, and its only network leads nowhere.
    assert with_default == {"POSTGRES_PASSWORD": {"postgres"}, "PGPASSWORD": {"study", "service"}}
    assert "ports" not in SERVICES["postgres"] and SERVICES["postgres"]["networks"] == ["database"]
    assert COMPOSE["networks"]["database"] == {"internal": True}
    # Ray's token is made where it is used.
    assert "token_hex(32)" in str(SERVICES["ray-head"]["command"])
    for name in NODES:
        assert SERVICES[name]["environment"]["RAY_AUTH_MODE"] == "token"
        assert SERVICES[name]["environment"]["RAY_AUTH_TOKEN_PATH"].startswith("/secret/")
        assert "secret:/secret" in SERVICES[name]["volumes"]
    assert not any("secret" in volume for volume in SERVICES["service"]["volumes"])


def test_workers_are_not_on_the_databases_network():
    assert SERVICES["ray-worker"]["networks"] == ["cluster"]
    assert "database" not in SERVICES["ray-head"]["networks"]
    assert set(SERVICES["ray-worker"]["environment"]).isdisjoint({"GRADNORM_DB", "PGPASSWORD"})


def test_runs_and_database_outlive_containers_and_the_service_only_reads():
    assert set(COMPOSE["volumes"]) == {"runs", "database", "secret"}
    assert all("runs:/runs" in SERVICES[name]["volumes"] for name in NODES)
    assert SERVICES["service"]["volumes"] == ["runs:/runs:ro"]
    assert SERVICES["postgres"]["volumes"] == ["database:/var/lib/postgresql/data"]


@pytest.mark.parametrize("name", NODES)
def test_the_object_store_is_one_that_ray_takes_and_fits_into_shared_memory(name):
    text = str(SERVICES[name]["command"]) + (ROOT / "docker" / "driver").read_text()
    size = int(re.search(r"--object-store-memory=(\d+)", text)[1])
    assert 80_000_000 <= size <= megabytes(SERVICES[name]["shm_size"]) * 2**20 / 2


def test_every_variable_is_explained_and_every_explained_variable_is_used():
    used = {
        found[1]
        for name in ("docker-compose.yml", "docker-compose.gpu.yml")
        for found in VARIABLE.finditer((ROOT / name).read_text())
    }
    used |= {key for one in SERVICES.values() for key, value in one["environment"].items() if value is None}
    explained = set(re.findall(r"^#(\w+)=", (ROOT / ".env.example").read_text(), flags=re.MULTILINE))
    internal = {"GRADNORM_TAG", "POSTGRES_IMAGE"}  # for tests and registries
    assert used - internal == explained


def test_env_example_sets_nothing_by_itself():
    lines = (ROOT / ".env.example").read_text().splitlines()
    assert all(not line or line.startswith("#") for line in lines)
    for name, value in re.findall(r"^#(\w+)=(.*)$", "\n".join(lines), flags=re.MULTILINE):
        assert not (SECRET.search(name) and value), f"{name} has a value to be copied"


def test_every_node_of_the_gpu_override_runs_one_image_and_workers_get_the_devices():
    services = GPU["services"]
    assert set(services) == set(NODES)
    assert len({service["image"] for service in services.values()}) == 1
    assert {default(service["build"]["args"]["TORCH_INDEX"]) for service in services.values()} == {""}
    (devices,) = services["ray-worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices["driver"] == "nvidia" and devices["capabilities"] == ["gpu"]
    assert "deploy" not in services["ray-head"] and "deploy" not in services["study"]


def test_the_dockerfile_needs_no_other_frontend():
    assert not re.search(r"^#\s*syntax\s*=", DOCKERFILE, flags=re.MULTILINE | re.IGNORECASE)
    assert "--mount" not in DOCKERFILE and "<<" not in DOCKERFILE


def test_everything_that_an_image_installs_is_held_to_the_constraints():
    # One instruction a line, with its continued lines.
    instructions = re.sub(r"\\\n", " ", DOCKERFILE).splitlines()
    installs = [line for line in instructions if "pip install" in line or "pip --python" in line]
    assert len(installs) == 2
    assert all("-c constraints.txt" in line for line in installs)
    assert "torch" not in stage("service") + stage("service-packages")


def test_code_comes_after_packages_so_that_a_change_rebuilds_in_seconds():
    for name in ("study-packages", "service-packages", "lists", "base"):
        copied = re.findall(r"^COPY (?:--from=\S+ )?(\S+)", stage(name), flags=re.MULTILINE)
        assert set(copied) <= {"pyproject.toml", "constraints.txt", "/tmp/study.txt", "/tmp/service.txt"}
    for name in ("study", "service"):
        copied = re.findall(r"^COPY (?:--from=\S+ )?(\S+)", stage(name), flags=re.MULTILINE)
        assert copied[0] == "/opt/venv"
        assert "pip install" not in stage(name)


def test_the_build_context_is_what_the_dockerfile_copies():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    allowed = {line[1:] for line in lines if line.startswith("!")}
    copied = re.findall(r"^COPY ([^-/]\S*)", DOCKERFILE, flags=re.MULTILINE)
    assert allowed == {source.split("/")[0] for source in copied}
    assert all((ROOT / name).exists() for name in allowed)


def test_the_service_imports_nothing_that_its_image_leaves_out():
    left_out = re.search(r"cd scipy && rm -r ([\w ]+)", DOCKERFILE)[1].split()
    names = [f"scipy.{name}" for name in left_out] + [
        "narwhals",
        "plotly.graph_objs",
        "pyarrow.flight",
        "PIL._avif",
    ]
    code = (
        "import sys, service.app, service.plots, study.reading, scipy.stats, pyarrow.parquet, PIL.Image\n"
        "from pyarrow import csv, feather, fs, ipc\n"
        f"print([name for name in {names} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT)
    assert ran.stdout.strip() == "[]"


def test_without_an_engine_the_compose_test_says_so_in_one_line():
    if shutil.which("bash") is None:
        pytest.skip("no bash")
    environment = os.environ | {"DOCKER_HOST": "unix:///nowhere/docker.sock", "GRADNORM_ENGINE": ""}
    script = ROOT / "tests" / "compose.sh"
    ran = subprocess.run(
        ["bash", script], check=False, capture_output=True, text=True, env=environment, timeout=60
    )
    assert ran.returncode == 1
    assert ran.stdout == "" and len(ran.stderr.splitlines()) == 1 and "no Docker engine" in ran.stderr
