"""Records a run and shows it: its folder, metrics, spans, images, trackers, the console, the summary.

`RunDirectory` has the paths of a run folder and its line files. `SpanLog` keeps spans on disk, `write_trace` makes the
timeline of them, and `Activity` sums them up for the `Summary`. `for_stream` returns a `Console`. `sinks` sends to
MLflow and others, each in its own thread. `metrics` lists every metric. `image_grid` and `write_media` make samples
visible. Nothing here makes decisions: the callers own the run.
"""
