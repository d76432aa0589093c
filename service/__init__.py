"""The HTTP service: reads the catalogue and the traces; knows neither Ray nor torch."""
