"""A local server that stands for the Hugging Face hub."""

from http.server import BaseHTTPRequestHandler


class HubHandler(BaseHTTPRequestHandler):
    """Sends answers with the headers that the hub's library reads."""

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        """Send an answer; its body only to a GET."""
        self.send_response(status)
        headers |= {"X-Repo-Commit": "a" * 40, "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Log nothing."""
