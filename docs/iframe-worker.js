// Pages opened from a disk may not start workers, and the search is one. There, and only there, a hidden frame
// takes the worker's place: it runs the same script in a window of its own and passes messages both ways.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      (document.body || document.documentElement).append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data: structuredClone(data) });
        setTimeout(() => {
          this.onmessage?.(event);
          this.dispatchEvent(event);
        });
      };
      inside.importScripts = () => {};
      const script = inside.document.createElement("script");
      script.src = new URL(url, document.baseURI);
      script.onload = () => {
        const held = this.waiting;
        this.waiting = null;
        held.forEach((data) => this.postMessage(data));
      };
      inside.document.documentElement.append(script);
    }
    postMessage(data) {
      if (this.waiting) {
        this.waiting.push(data);
        return;
      }
      const inside = this.frame.contentWindow;
      const event = new inside.MessageEvent("message", { data: inside.structuredClone(data) });
      setTimeout(() => inside.dispatchEvent(event));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
