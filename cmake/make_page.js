// make_page.js PLANNER.js PAGE.html: the planner's own page with the planner inside.
"use strict";
const fs = require("fs");
const [planner, page] = process.argv.slice(2);
require(require("path").resolve(planner))({ noInitialRun: true }).then(module => {
  module.callMain(["page", "/start.html"]);
  const html = module.FS.readFile("/start.html", { encoding: "utf8" }), mark = '<script type="application/json"';
  const code = fs.readFileSync(planner, "utf8");
  if (code.includes("</script") || !html.includes(mark)) throw new Error("the planner does not fit into its page");
  fs.writeFileSync(page, html.replace(mark, () => "<script>\n" + code + "\n</script>\n" + mark));
});
