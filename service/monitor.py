"""How the service itself fares: /healthz, /readyz, /metrics (Prometheus)."""

from collections.abc import Iterator

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from service import schemas
from service.context import Context, Ctx
from service.problems import problem_responses

router = APIRouter(tags=["service"])
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Monitor:
    """Counters of one app, in a registry of its own."""

    def __init__(self, context: Context) -> None:
        self.registry = CollectorRegistry()
        labels = ("method", "route", "status")
        self.requests = Counter("gradnorm_requests", "Answers", labels, registry=self.registry)
        self.seconds = Histogram(
            "gradnorm_request_seconds",
            "Time to the last byte",
            ("route",),
            buckets=BUCKETS,
            registry=self.registry,
        )
        self.context = context
        self.registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """What pools and caches know of themselves, read when asked."""
        waiting = GaugeMetricFamily("gradnorm_pool_waiting", "Requests that wait", labels=["pool"])
        working = GaugeMetricFamily("gradnorm_pool_working", "Requests at work", labels=["pool"])
        refused = CounterMetricFamily("gradnorm_pool_refused", "Answered 503: queue full", labels=["pool"])
        timeouts = CounterMetricFamily("gradnorm_pool_timeouts", "Answered 503: too slow", labels=["pool"])
        done = CounterMetricFamily("gradnorm_pool_done", "Ended, well or not", labels=["pool"])
        spent = CounterMetricFamily("gradnorm_pool_seconds", "Seconds waited and worked", labels=["pool"])
        for pool in (self.context.reads, self.context.renders):
            waiting.add_metric([pool.name], pool.num_waiting)
            working.add_metric([pool.name], pool.num_pending - pool.num_waiting)
            refused.add_metric([pool.name], pool.num_refused)
            timeouts.add_metric([pool.name], pool.num_timeouts)
            done.add_metric([pool.name], pool.num_done)
            spent.add_metric([pool.name], pool.seconds)
        hits = CounterMetricFamily("gradnorm_cache_hits", "Found", labels=["cache"])
        misses = CounterMetricFamily("gradnorm_cache_misses", "Not found", labels=["cache"])
        size = GaugeMetricFamily("gradnorm_cache_bytes", "Bytes held", labels=["cache"])
        for name, cache in (("pictures", self.context.pictures), ("traces", self.context.store.columns)):
            hits.add_metric([name], cache.hits)
            misses.add_metric([name], cache.misses)
            size.add_metric([name], cache.num_bytes)
        yield from (waiting, working, refused, timeouts, done, spent, hits, misses, size)


@router.get("/healthz")
async def healthz() -> schemas.Health:
    """The process answers; asks neither the database nor the pools."""
    return schemas.Health()


@router.get("/readyz", responses=problem_responses(401, 503))
async def readyz(context: Ctx) -> schemas.Readiness:
    """The database can be read and its schema is known; 503 otherwise."""
    empty = await context.reads.run(context.store.is_empty)
    return schemas.Readiness(catalogue="empty" if empty else "ready")


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}},
        **problem_responses(401),
    },
)
async def metrics(context: Ctx) -> Response:
    """Requests, pools and caches, for Prometheus."""
    return Response(
        generate_latest(context.monitor.registry), media_type="text/plain; version=0.0.4; charset=utf-8"
    )
