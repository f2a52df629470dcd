"""A real Prometheus on loopback, which scrapes metrics that a test writes or a function renders.

It knows neither pytest nor rolloutd.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

from tests.support.ports import free_port

PROMETHEUS = "/usr/bin/prometheus"

LIMIT_S = 60.0
"""How long a loaded machine may take to start it, or to scrape once."""

_CONFIG = """\
global: {{scrape_interval: 200ms, scrape_timeout: 200ms}}
scrape_configs:
- job_name: {job}
  honor_labels: true
  static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
rule_files: {rules}
"""


class Prometheus:
    """One Prometheus: `start(directory)`, then `url` and `set_metric()`, then `stop()`.

    `page` is a text of metrics besides those of the test; `rules` are files with alert rules.
    """

    def __init__(self, page: bytes = b"", rules: Sequence[Path] = (), job: str = "tests") -> None:
        self.url = ""
        self._rules, self._job = rules, job
        self._metrics: dict[str, float] = {}
        metrics = self._metrics

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lines = [f"{series} {value}\n" for series, value in list(metrics.items())]
                body = "".join(lines).encode() + page
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the base class's name
                pass

        self._page = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        self._page_thread = Thread(target=self._page.serve_forever)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, directory: Path) -> Prometheus:
        """Start the page of metrics and the server, with its data in the directory."""
        self._page_thread.start()
        directory.mkdir(parents=True, exist_ok=True)
        config = directory / "prometheus.yml"
        rules = json.dumps([str(file) for file in self._rules])
        config.write_text(_CONFIG.format(port=self._page.server_address[1], rules=rules, job=self._job))
        until = time.monotonic() + LIMIT_S
        # Another test may take the port between our choice and the server's bind; it is chosen again.
        while not self._start_process(config, until):
            assert time.monotonic() < until, "Prometheus did not start"
        return self

    def stop(self) -> None:
        """End the server and the page."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._page.shutdown()
        self._page_thread.join()
        self._page.server_close()

    async def set_metric(self, series: str, value: float | None) -> None:
        """Let a series have this value, None: let it end; wait until Prometheus has scraped that."""
        if value is None:
            self._metrics.pop(series, None)
        else:
            self._metrics[series] = value
        async with asyncio.timeout(LIMIT_S):
            while await asyncio.to_thread(self._query, series) != value:
                await asyncio.sleep(0.05)

    def query(self, query: str) -> list[Any]:
        """Return the result of a query; raises HTTPError if Prometheus refuses it."""
        return list(self.get("query", query=query)["result"])

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of the API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url) as response:
            return json.load(response)["data"]

    def _query(self, query: str) -> float | None:
        result = self.query(query)
        return float(result[0]["value"][1]) if result else None

    def _start_process(self, config: Path, until: float) -> bool:
        port = free_port()
        command = [
            PROMETHEUS,
            f"--config.file={config}",
            f"--storage.tsdb.path={config.parent / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{port}"
        while self._process.poll() is None and time.monotonic() < until:
            try:
                with urllib.request.urlopen(f"{self.url}/-/ready"):
                    return True
            except urllib.error.URLError:
                time.sleep(0.05)
        return False
