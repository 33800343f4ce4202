// Lets the search run when the pages are opened as files: browsers refuse workers of such pages, so a
// script for a worker runs in a hidden frame. The name of this file makes the theme load no other polyfill.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.messages = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      const inside = this.frame.contentWindow;
      inside.document.open();
      inside.document.write("<!doctype html><html><body></body></html>");
      inside.document.close();
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each);
      };
      this.load(url).then(() => {
        this.ready = true;
        this.messages.splice(0).forEach((data) => this.deliver(data));
      });
    }
    load(url) {
      const script = this.frame.contentDocument.createElement("script");
      return new Promise((resolve, reject) => {
        Object.assign(script, { src: url, onload: resolve, onerror: reject });
        this.frame.contentDocument.body.appendChild(script);
      });
    }
    deliver(data) {
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }
    postMessage(data) {
      this.ready ? this.deliver(data) : this.messages.push(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
