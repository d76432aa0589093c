"""The OpenAPI document, and the service held to it by generated requests.

GRADNORM_SCHEMATHESIS_CASES sets how many requests an operation gets (12 in `make test`).
"""

import os

import numpy as np
import pytest
import schemathesis
from conftest import TinyStore
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig

from service.app import create_app
from service.plots import PLOTS
from service.settings import Settings

CASES = int(os.environ.get("GRADNORM_SCHEMATHESIS_CASES", "12"))
# What a document can't say: which fields, trials and metrics a run has, and that `from` is before `to`.
REFUSED = ["2xx", "401", "404", "422", "503"]
CONFIG = SchemathesisConfig.from_dict(
    {"checks": {"positive_data_acceptance": {"expected-statuses": REFUSED}}}
)
IDS = ("latest", "r", "r_00001", "broken", "empty", "nobody")


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    store = TinyStore(tmp_path_factory.mktemp("api") / "runs")
    store.add_run("empty", steps=0)
    norms = np.where(np.arange(40) < 30, 1.0, np.nan)
    store.add_run("broken", steps=40, traces={(0, 0): {"step": np.arange(1, 41), "grad_norm": norms}})
    store.add_run("r", seeds=2)
    app = create_app(Settings(storage=str(store.folder), log_level="error"))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, config=CONFIG)

    @schema.hook
    def map_path_parameters(context, path_parameters):
        # Ids out of thin air are all unknown; most requests are to reach a run.
        given = path_parameters or {}
        if isinstance(given.get("id"), str) and len(given["id"]) <= 80:
            choice = sum(map(ord, given["id"])) % (2 * len(IDS))
            return {**given, "id": IDS[choice]} if choice < len(IDS) else given
        return given

    return schema


def operations() -> list[str]:
    """Paths of the document, which needs no store."""
    return list(create_app(Settings(storage="nowhere", log_level="error")).openapi()["paths"])


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", operations())
def test_every_answer_is_one_that_the_document_names(api, path, mode):
    @given(case=api[path]["GET"].as_strategy(generation_mode=mode))
    @settings(
        max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck),
        phases=[Phase.explicit, Phase.generate], database=None,
    )  # fmt: skip
    def hold(case):
        case.call_and_validate()

    try:
        hold()
    except Unsatisfiable:
        pytest.skip("takes no parameter that could be wrong")


def test_the_document_names_every_plot(api):
    operation = api.raw_schema["paths"]["/runs/{id}/{plot}.{kind}"]["get"]
    plot = next(parameter for parameter in operation["parameters"] if parameter["name"] == "plot")
    assert plot["schema"]["enum"] == list(PLOTS)


def test_every_operation_names_its_problems(api):
    for path, operations in api.raw_schema["paths"].items():
        for operation in operations.values():
            for status, answer in operation["responses"].items():
                if status >= "400":
                    assert list(answer["content"]) == ["application/problem+json"], (path, status)
