// make_page.js PLANNER.js WORKER.js PAGE.html: the planner's own page with the planner inside, as text that a worker is made of.
"use strict";
const fs = require("fs");
const [planner, worker, page] = process.argv.slice(2);
require(require("path").resolve(planner))({ noInitialRun: true }).then(module => {
  module.callMain(["page", "/start.html"]);
  const html = module.FS.readFile("/start.html", { encoding: "utf8" }), mark = '<script type="application/json"';
  const code = fs.readFileSync(planner, "utf8") + "\n" + fs.readFileSync(worker, "utf8").replaceAll("</script", "<\\/script");
  if (/<\/script|<!--/i.test(code) || !html.includes(mark)) throw new Error("the planner does not fit into its page");
  fs.writeFileSync(page, html.replace(mark, () => '<script type="text/plain">\n' + code + "</script>\n" + mark));
});
