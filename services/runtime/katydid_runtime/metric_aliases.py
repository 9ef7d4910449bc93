"""Metrics once more under the names that other projects' dashboards and autoscalers read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

__all__ = ["MetricAlias", "MetricAliases"]


@dataclass(frozen=True, slots=True)
class MetricAlias:
    """`name` shows the metric `source`, its series that bear `chosen`; labels in `renamed` get another name, and those
    renamed to "" are left out. A counter's names are without `_total`."""

    name: str
    source: str
    chosen: Mapping[str, str] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)


class MetricAliases:
    """A collector over `registry`, to be registered there too; every alias bears `labels`, its own win."""

    def __init__(self, registry: CollectorRegistry, aliases: Sequence[MetricAlias], labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._aliases = aliases
        self._labels = labels
        self._reading = False

    def collect(self) -> Iterator[Metric]:
        """The aliases whose sources are there."""
        # Reading the registry comes back here: it holds this collector as well.
        if self._reading:
            return
        self._reading = True
        try:
            sources = {metric.name: metric for metric in self._registry.collect()}
        finally:
            self._reading = False
        yield from self.made_of(sources)

    def made_of(self, sources: Mapping[str, Metric]) -> Iterator[Metric]:
        """The aliases of these metrics, by name."""
        for alias in self._aliases:
            if alias.source in sources:
                yield self._alias(alias, sources[alias.source])

    def _alias(self, alias: MetricAlias, source: Metric) -> Metric:
        from prometheus_client.core import Metric

        shown = Metric(alias.name, source.documentation, source.type)
        for sample in source.samples:
            if any(sample.labels.get(label) != value for label, value in alias.chosen.items()):
                continue
            names = {key: alias.renamed.get(key, key) for key in sample.labels}
            own = {name: sample.labels[key] for key, name in names.items() if name}
            shown.add_sample(alias.name + sample.name.removeprefix(source.name), {**self._labels, **own}, sample.value)
        return shown
