"""What a server counts, for Prometheus. Numbers only: nothing of a request's content."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
CONTENT_TYPE = CONTENT_TYPE_LATEST

HELP = {
    "opd_outstanding_tokens": "Tokens of requests that are accepted and not yet answered",
    "opd_outstanding_bytes": "Bytes held for requests and their answers",
    "opd_batches": "Forward passes of scoring",
    "opd_scored_tokens": "Tokens whose scores were computed",
    "opd_sampled_tokens": "Tokens sampled",
    "opd_weight_syncs": "Times that other weights were taken over",
    "opd_floored_logps": "Log-probs raised to the floor",
    "opd_stream_cache_bytes": "Bytes of the KV caches of unfinished sequences",
    "opd_streams": "Unfinished sequences whose KV cache is held",
    "opd_stream_hits": "Requests that went on from a held KV cache",
    "opd_stream_evictions": "KV caches given up for others",
}
GAUGES = {"opd_outstanding_tokens", "opd_outstanding_bytes", "opd_stream_cache_bytes", "opd_streams"}


class ServerMetrics:
    """The metrics of one server in a registry of their own."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        """`read` gives the values of all names in `HELP` when somebody looks."""
        self.registry = CollectorRegistry()
        self.registry.register(_Values(read))
        self.requests = Counter("opd_requests", "Requests answered", ["route", "status"], registry=self.registry)
        self.seconds = Histogram(
            "opd_request_seconds", "From headers to answer", ["route"], buckets=SECONDS, registry=self.registry
        )

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Counts one request. `route` is the route's pattern, so that the labels stay few."""
        self.requests.labels(route, str(status)).inc()
        self.seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """The exposition format of `CONTENT_TYPE`."""
        return generate_latest(self.registry)


class _Values(Collector):
    """Values that others count, read when somebody looks."""

    def __init__(self, read: Callable[[], Mapping[str, float]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        for name, value in self._read().items():
            kind = GaugeMetricFamily if name in GAUGES else CounterMetricFamily
            yield kind(name, HELP[name], value=value)
