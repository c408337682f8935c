"""Where events go besides the log: a file of JSON lines, TensorBoard's scalars, OpenTelemetry's instruments."""

from gradientmail_core.sinks.jsonlines import JsonLines
from gradientmail_core.sinks.opentelemetry import OpenTelemetry
from gradientmail_core.sinks.tensorboard import TensorBoard

__all__ = ["JsonLines", "OpenTelemetry", "TensorBoard"]
