#include "apps/view_server.h"

#include <fmt/format.h>
#include <httplib.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "apps/stop_signals.h"
#include "base/error.h"
#include "base/open_file.h"
#include "base/start_thread.h"

namespace echelon {
namespace {

constexpr const char* this_machine = "127.0.0.1";
constexpr std::int64_t largest_trace = std::int64_t{4} << 30;

void add_routes(httplib::Server& server, const ServedView& view) {
  server.Get("/", [&view](const httplib::Request&, httplib::Response& response) {
    response.set_content(page_html(view.page(view.tag()), PageUse::served), "text/html; charset=utf-8");
  });
  server.Get("/document.json", [&view](const httplib::Request& request, httplib::Response& response) {
    const std::string tag = view.tag();
    response.set_header("ETag", tag);
    if (request.get_header_value("If-None-Match") == tag)
      response.status = 304;
    else
      response.set_content(page_json(view.page(tag)), "application/json");
  });
  server.Get("/trace/(.+)", [&view](const httplib::Request& request, httplib::Response& response) {
    const std::vector<ServedTrace> traces = view.traces();
    const auto found = std::find_if(traces.begin(), traces.end(),
                                    [&](const ServedTrace& one) { return one.name == request.matches[1]; });
    if (found == traces.end())
      response.status = 404;
    else
      response.set_content(read_text(found->path, "view", largest_trace), "application/json");
  });
}

}  // namespace

void serve_view(const ServedView& view, int port, const std::function<void(const std::string&)>& begun) {
  StopSignals signals;  // before the server's threads
  httplib::Server server;
  server.new_task_queue = [] { return new httplib::ThreadPool(4); };
  server.set_keep_alive_timeout(1);  // ending waits this long for a browser
  // The library's default would let another process of this user share the port.
  server.set_socket_options([](socket_t socket) {
    const int yes = 1;
    ::setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
  });
  server.set_default_headers(
      {{"Cache-Control", "no-store"},
       {"Content-Security-Policy",
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"},
       {"Cross-Origin-Resource-Policy", "same-origin"},
       {"Referrer-Policy", "no-referrer"},
       {"X-Content-Type-Options", "nosniff"}});
  add_routes(server, view);
  const int bound = port > 0 ? (server.bind_to_port(this_machine, port) ? port : -1)
                             : server.bind_to_any_port(this_machine);
  if (bound <= 0)
    refuse("--port {}: cannot be listened on at {}; legal: 0, one that is free", port, this_machine);
  const std::string numbers = fmt::format("{}:{}", this_machine, bound),
                    name = fmt::format("localhost:{}", bound);
  server.set_pre_routing_handler([&](const httplib::Request& request, httplib::Response& response) {
    const std::string host = request.get_header_value("Host");
    if (host == numbers || host == name) return httplib::Server::HandlerResponse::Unhandled;
    response.status = 403;
    response.set_content(fmt::format("This is {}, and answers to that name alone.\n", numbers), "text/plain");
    return httplib::Server::HandlerResponse::Handled;
  });
  signals.listen();
  begun(fmt::format("http://{}/", numbers));  // who calls before it listens is queued by the socket
  auto serving = start_thread("view", [&server] { server.listen_after_bind(); });
  constexpr std::chrono::milliseconds look_again{50};
  while (!signals.asked()) std::this_thread::sleep_for(look_again);
  server.stop();
  serving.join();
}

}  // namespace echelon
