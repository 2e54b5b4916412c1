"""Records a run and shows it: its folder, metrics, spans, images, MLflow, the console, the summary.

`RunDirectory` has the paths of a run folder and its line files, `SpanLog` keeps spans, of which `summarise` makes a
`Summary` and `write_trace` the timeline; `for_stream` gives a `Console`; `MlflowSink` sends to MLflow on a thread of
its own; `image_grid` and `write_media` make samples visible. Nothing here decides anything: who calls it owns the run.
"""
