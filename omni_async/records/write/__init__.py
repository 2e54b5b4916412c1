"""Records a run and shows it: its folder, metrics, spans, images, trackers, the console, the summary.

`RunDirectory` has the paths of a run folder and its line files, `SpanLog` keeps spans, of which `summarise` makes a
`Summary` and `write_trace` the timeline; `for_stream` gives a `Console`; `sinks` sends to MLflow and others, each on
a thread of its own; `catalogue` says what every metric is; `image_grid` and `write_media` make samples visible. Nothing
here decides anything: who calls it owns the run.
"""
